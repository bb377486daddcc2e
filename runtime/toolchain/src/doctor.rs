//! A report on the targets that this machine can compile for and run on.

use crate::pip::Python;
use crate::{Registry, open};
use moesaic_collectives::mpi::{MpiOptions, probe};
use moesaic_collectives::nccl;
use moesaic_kernel::Target;
use moesaic_target::{CompileError, Compiler};
#[cfg(any(feature = "cuda", feature = "rocm"))]
use moesaic_target::{Device, DeviceError};

/// The result of looking for one tool or device.
#[derive(Clone, Debug, PartialEq)]
pub struct DoctorFinding {
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
pub fn doctor(registry: &Registry) -> Vec<DoctorFinding> {
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
fn cuda_device() -> DoctorFinding {
    use moesaic_cuda::CudaDevice;
    device("CUDA device", CudaDevice::count(), CudaDevice::open)
}

#[cfg(not(feature = "cuda"))]
fn cuda_device() -> DoctorFinding {
    DoctorFinding {
        tried: "moesaic was built without its `cuda` feature".to_string(),
        ..DoctorFinding::of("CUDA device")
    }
}

#[cfg(feature = "rocm")]
fn rocm_device() -> DoctorFinding {
    use moesaic_rocm::HipDevice;
    device("ROCm device", HipDevice::count(), HipDevice::open)
}

#[cfg(not(feature = "rocm"))]
fn rocm_device() -> DoctorFinding {
    DoctorFinding {
        tried: "moesaic was built without its `rocm` feature".to_string(),
        ..DoctorFinding::of("ROCm device")
    }
}

/// Reports the first GPU, and the number of them.
#[cfg(any(feature = "cuda", feature = "rocm"))]
fn device<D: Device>(
    subject: &'static str,
    count: Result<usize, DeviceError>,
    open: impl Fn(usize) -> Result<D, DeviceError>,
) -> DoctorFinding {
    let opened = count.and_then(|count| Ok((count, open(0)?)));
    match opened {
        Ok((count, device)) => DoctorFinding {
            found: Some(format!("{count} x {}", device.info().name)),
            targets: vec![device.info().target],
            ..DoctorFinding::of(subject)
        },
        Err(error) => {
            let tried = match error {
                DeviceError::Unavailable { reason, .. } => reason.to_string(),
                error => error.to_string(),
            };
            DoctorFinding {
                tried,
                ..DoctorFinding::of(subject)
            }
        }
    }
}

fn mpi(registry: &Registry) -> DoctorFinding {
    let options = MpiOptions {
        installed: open::mpi(registry).map(|installed| installed.library),
        ..MpiOptions::default()
    };
    match probe(&options) {
        Ok(found) => DoctorFinding {
            found: Some(format!("{}, by {}", found.version, found.interface)),
            place: Some(found.library),
            ..DoctorFinding::of("MPI library")
        },
        Err(error) => {
            let text = error.to_string();
            let tried = text.lines().next().unwrap_or_default().to_string();
            DoctorFinding {
                tried,
                advice: "for ranks in several processes: `moesaic toolchain install mpi`"
                    .to_string(),
                ..DoctorFinding::of("MPI library")
            }
        }
    }
}

/// Reports the libraries that ranks with a GPU each need.
fn gpu_ranks(subject: &'static str, target: &str) -> DoctorFinding {
    let missing = |tried: String, advice: &str| DoctorFinding {
        tried,
        advice: advice.to_string(),
        ..DoctorFinding::of(subject)
    };
    let target = match target.parse() {
        Ok(target) => target,
        Err(_) => return missing(format!("`{target}` is no target"), ""),
    };
    match nccl::probe(target, &nccl::NcclOptions::default()) {
        Ok(found) => DoctorFinding {
            found: Some(found.version),
            place: Some(found.library),
            ..DoctorFinding::of(subject)
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

fn pip() -> DoctorFinding {
    let advice = "install Python 3 with pip, unless every compiler you need is there";
    match Python::of_machine().pip_version() {
        Ok(version) => DoctorFinding {
            found: Some(version),
            ..DoctorFinding::of("pip")
        },
        Err(tried) => DoctorFinding {
            tried,
            advice: advice.to_string(),
            ..DoctorFinding::of("pip")
        },
    }
}

impl DoctorFinding {
    fn of(subject: &'static str) -> DoctorFinding {
        DoctorFinding {
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
) -> DoctorFinding {
    match opened {
        Ok(compiler) => DoctorFinding {
            found: Some(compiler.name()),
            place: Some(place(&compiler)),
            targets: compiler.targets(),
            ..DoctorFinding::of(subject)
        },
        Err(error) => missing(subject, error),
    }
}

fn missing(subject: &'static str, error: CompileError) -> DoctorFinding {
    let (tried, advice) = match error {
        CompileError::NoCompiler { tried, advice, .. } => (tried, advice),
        error => (error.to_string(), String::new()),
    };
    DoctorFinding {
        tried,
        advice,
        ..DoctorFinding::of(subject)
    }
}
