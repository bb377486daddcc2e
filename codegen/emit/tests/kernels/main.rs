//! Kernels of every target: their text, what real compilers make of it, and what it
//! computes, here and on simulated GPUs, next to the f64 reference.

mod activation;
mod amd_banks;
mod combine;
mod comm_cast;
mod cpu_backward;
mod cpu_compile;
mod cpu_kernels;
mod cpu_numbers;
mod cpu_registers;
mod gemm_amd;
mod gemm_amd_bwd;
mod gemm_decode;
mod gemm_fused_shared;
mod gemm_mma;
mod gemm_wgmma;
mod gpu_backward;
mod gpu_compile;
mod gpu_loads;
mod gpu_math;
mod gpu_routing;
mod gpu_run;
mod gpu_waits;
mod grads_compile;
mod grads_layers;
mod grads_mma;
mod grads_wgmma;
mod includes;
mod long_expressions;
mod many_experts_compile;
mod narrower;
mod rms_norm;
mod router_bwd_cpu;
mod router_bwd_gpu;
mod routing_options;
mod same_text;
