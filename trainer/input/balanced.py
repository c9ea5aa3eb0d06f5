"""Balanced sampling: an epoch's order in which rare classes come more often. Loaded by data.balance."""

from collections.abc import Callable

import numpy as np


def quotas(counts_K: np.ndarray, *, balance: float) -> np.ndarray:
    """Return how often each class comes in an epoch of as many samples as there are images, int64 (K).

    In proportion to count ** (1 - balance), rounded by largest remainder; classes without images stay without.
    Source: Kang et al. 2020 (arXiv 1910.09217), where q = 1 - balance.
    """
    shares_K = np.where(counts_K > 0, counts_K.astype(np.float64) ** (1 - balance), 0.0)
    exact_K = counts_K.sum() * shares_K / shares_K.sum()
    quotas_K = np.floor(exact_K).astype(np.int64)
    missing = int(counts_K.sum() - quotas_K.sum())
    quotas_K[np.argsort(quotas_K - exact_K, kind="stable")[:missing]] += 1
    return quotas_K


def balanced_order(labels_N: np.ndarray, *, seed: int, balance: float) -> Callable[[int], np.ndarray]:
    """Return a function of an epoch that gives its order: indices (int64) of as many requests as there are images.

    Index i + r N is image i, drawn for the r-th time after the first. Each image of a class comes as often as the
    others of it, or once more. The order depends on seed and epoch alone.
    """
    num = len(labels_N)
    counts_K = np.bincount(labels_N)
    quotas_K = quotas(counts_K, balance=balance)
    first_K = np.cumsum(counts_K) - counts_K

    def order(epoch: int) -> np.ndarray:
        words_2N = np.random.Philox(np.random.SeedSequence((seed, epoch))).random_raw(2 * num)
        # images by class, in random order within each
        by_class_N = np.lexsort((words_2N[:num], labels_N))
        classes_N = np.repeat(np.arange(len(quotas_K)), quotas_K)
        draws_N = np.arange(num) - np.repeat(np.cumsum(quotas_K) - quotas_K, quotas_K)
        rounds_N, places_N = np.divmod(draws_N, counts_K[classes_N])
        indices_N = by_class_N[first_K[classes_N] + places_N] + rounds_N * num
        return indices_N[np.argsort(words_2N[num:], kind="stable")].astype(np.int64, copy=False)

    return order
