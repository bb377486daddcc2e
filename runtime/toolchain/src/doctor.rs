//! A report on the targets that this machine can compile for and run on.

use crate::pip::Python;
use crate::{Registry, open};
use moesaic_collectives::mpi::{Options, probe};
use moesaic_collectives::nccl;
use moesaic_kernel::Target;
use moesaic_target::{CompileError, Compiler};
#[cfg(any(feature = "cuda", feature = "rocm"))]
use moesaic_target::{Device, DeviceError};

/// The result of looking for one tool or device.
#[derive(Clone, Debug, PartialEq)]
pub struct Finding {
    /// The subject, such as `CUDA compiler`.
    pub subject: &'static str,
    /// Its name and version; `None` if nothing was found.
    pub found: Option<String>,
    /// Its place: a path, or a name that the system's loader resolved.
    pub place: Option<String>,
    /// The targets that it compiles for, or the one target of a device.
    pub targets: Vec<Target>,
    /// The places searched in vain; empty if something was found.
    pub tried: String,
    /// The recommended action; empty if there is none.
    pub advice: String,
}

/// Looks for every compiler and every GPU, and for the prerequisites of installing.
pub fn doctor(registry: &Registry) -> Vec<Finding> {
    vec![
        compiler("C compiler", open::c(registry), |c| {
            c.program().display().to_string()
        }),
        compiler("CUDA compiler", open::nvrtc(registry), |nvrtc| {
            nvrtc.library().to_string()
        }),
        compiler("ROCm compiler", open::rocm(registry), |clang| {
            clang.program().display().to_string()
        }),
        mpi(registry),
        gpu_ranks("NCCL library", "cuda:sm_90a"),
        gpu_ranks("RCCL library", "rocm:gfx942"),
        cuda_device(),
        rocm_device(),
        pip(),
    ]
}

#[cfg(feature = "cuda")]
fn cuda_device() -> Finding {
    use moesaic_cuda::CudaDevice;
    device("CUDA device", CudaDevice::count(), CudaDevice::open)
}

#[cfg(not(feature = "cuda"))]
fn cuda_device() -> Finding {
    Finding {
        tried: "moesaic was built without its `cuda` feature".to_string(),
        ..Finding::of("CUDA device")
    }
}

#[cfg(feature = "rocm")]
fn rocm_device() -> Finding {
    use moesaic_rocm::HipDevice;
    device("ROCm device", HipDevice::count(), HipDevice::open)
}

#[cfg(not(feature = "rocm"))]
fn rocm_device() -> Finding {
    Finding {
        tried: "moesaic was built without its `rocm` feature".to_string(),
        ..Finding::of("ROCm device")
    }
}

/// Reports the first GPU, and the number of them.
#[cfg(any(feature = "cuda", feature = "rocm"))]
fn device<D: Device>(
    subject: &'static str,
    count: Result<usize, DeviceError>,
    open: impl Fn(usize) -> Result<D, DeviceError>,
) -> Finding {
    let opened = count.and_then(|count| Ok((count, open(0)?)));
    match opened {
        Ok((count, device)) => Finding {
            found: Some(format!("{count} x {}", device.info().name)),
            targets: vec![device.info().target],
            ..Finding::of(subject)
        },
        Err(error) => {
            let tried = match error {
                DeviceError::Unavailable { reason, .. } => reason.to_string(),
                error => error.to_string(),
            };
            Finding {
                tried,
                ..Finding::of(subject)
            }
        }
    }
}

fn mpi(registry: &Registry) -> Finding {
    let options = Options {
        installed: open::mpi(registry).map(|installed| installed.library),
        ..Options::default()
    };
    match probe(&options) {
        Ok(found) => Finding {
            found: Some(format!("{}, by {}", found.version, found.interface)),
            place: Some(found.library),
            ..Finding::of("MPI library")
        },
        Err(error) => {
            let text = error.to_string();
            let tried = text.lines().next().unwrap_or_default().to_string();
            Finding {
                tried,
                advice: "for ranks in several processes: `moesaic toolchain install mpi`"
                    .to_string(),
                ..Finding::of("MPI library")
            }
        }
    }
}

/// Reports the libraries that ranks with a GPU each need.
fn gpu_ranks(subject: &'static str, target: &str) -> Finding {
    let missing = |tried: String, advice: &str| Finding {
        tried,
        advice: advice.to_string(),
        ..Finding::of(subject)
    };
    let target = match target.parse() {
        Ok(target) => target,
        Err(_) => return missing(format!("`{target}` is no target"), ""),
    };
    match nccl::probe(target, &nccl::Options::default()) {
        Ok(found) => Finding {
            found: Some(found.version),
            place: Some(found.library),
            ..Finding::of(subject)
        },
        Err(error) => {
            let text = error.to_string();
            let mut lines = text.lines();
            let tried = lines.next().unwrap_or_default().to_string();
            let advice = lines.next().unwrap_or_default();
            missing(tried, &format!("for ranks with a GPU each: {advice}"))
        }
    }
}

fn pip() -> Finding {
    let advice = "install Python 3 with pip, unless every compiler you need is there";
    match Python::of_machine().pip_version() {
        Ok(version) => Finding {
            found: Some(version),
            ..Finding::of("pip")
        },
        Err(tried) => Finding {
            tried,
            advice: advice.to_string(),
            ..Finding::of("pip")
        },
    }
}

impl Finding {
    fn of(subject: &'static str) -> Finding {
        Finding {
            subject,
            found: None,
            place: None,
            targets: Vec::new(),
            tried: String::new(),
            advice: String::new(),
        }
    }
}

fn compiler<C: Compiler>(
    subject: &'static str,
    opened: Result<C, CompileError>,
    place: impl Fn(&C) -> String,
) -> Finding {
    match opened {
        Ok(compiler) => Finding {
            found: Some(compiler.name()),
            place: Some(place(&compiler)),
            targets: compiler.targets(),
            ..Finding::of(subject)
        },
        Err(error) => missing(subject, error),
    }
}

fn missing(subject: &'static str, error: CompileError) -> Finding {
    let (tried, advice) = match error {
        CompileError::NoCompiler { tried, advice, .. } => (tried, advice),
        error => (error.to_string(), String::new()),
    };
    Finding {
        tried,
        advice,
        ..Finding::of(subject)
    }
}
