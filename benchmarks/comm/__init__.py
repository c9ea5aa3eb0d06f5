"""All-reduces, gradients, steps and scaling across emulated nodes, beside gloo, MPI and Horovod."""
