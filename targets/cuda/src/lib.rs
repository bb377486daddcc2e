//! The CUDA target: NVRTC to CUBIN, the driver API.
