//! Tests of the built binary, one binary: each that is linked costs seconds.

#[cfg(target_os = "linux")]
mod agreement;
mod as_one;
#[cfg(target_os = "linux")]
mod cluster;
mod commands;
mod common;
mod errors;
mod experts;
mod files;
mod grad;
#[cfg(target_os = "linux")]
mod launch;
#[cfg(target_os = "linux")]
mod launch_refused;
mod options;
mod passes;
mod plan;
mod plan_model;
mod precompile;
mod quantize;
mod ranks;
mod run;
#[cfg(target_os = "linux")]
mod slurm;
mod tune;
mod usage;
