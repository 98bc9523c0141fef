"""Training on GPUs: on a stand-in for one, in jobs of its own (`test_cuda_standin`), and on a real one with --gpu."""
