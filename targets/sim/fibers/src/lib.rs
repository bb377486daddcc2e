//! GPU kernels as host C++, a fiber for each thread.
