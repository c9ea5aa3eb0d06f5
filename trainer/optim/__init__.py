"""Large-batch optimizers, parameter groups and learning-rate schedules."""

from bigbatch.trainer.optim.lamb import LAMB
from bigbatch.trainer.optim.lars import LARS
from bigbatch.trainer.optim.muon import Muon
from bigbatch.trainer.optim.param_groups import decays, param_groups
from bigbatch.trainer.optim.schedule import SCHEDULES, Schedule, make_schedule
from bigbatch.trainer.optim.shampoo import Shampoo

__all__ = ["LAMB", "LARS", "SCHEDULES", "Muon", "Schedule", "Shampoo", "decays", "make_schedule", "param_groups"]
