//! One compiler per backend, located when you first ask for it.

use crate::simulators;
use moesaic_cache::Store;
use moesaic_cpu::{CpuCompiler, Identity, host_isa};
use moesaic_engine::PrecompileJob;
use moesaic_kernel::{CpuCaches, Target, TargetError};
use moesaic_plan::{CacheClass, PlanOptions, Training};
use moesaic_spec::LayerSpec;
use moesaic_target::{CompileError, Compiler};
use moesaic_toolchain::Registry;
use std::fmt;
use std::path::Path;
use std::sync::{Arc, Mutex};

/// A target name that cannot be resolved.
///
/// ```
/// use moesaic::{TargetNameError, resolve_target};
///
/// let error = resolve_target("cuda").unwrap_err(); // which one?
/// assert!(matches!(error, TargetNameError::NeedsArch { .. }), "{error}");
/// ```
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TargetNameError {
    /// The name is not known.
    #[error(
        "{0}; an engine also takes `cpu`, `cuda` or `rocm` for such a device of this machine, and \
         `auto` for the best one"
    )]
    Unknown(#[from] TargetError),
    /// The name gives a backend without an architecture.
    #[error(
        "`{asked}` names no architecture{missing}\n\
         write one out, such as {example}"
    )]
    NeedsArch {
        /// The name that you asked for.
        asked: String,
        /// The missing device that would give the architecture, in words for the message; empty for
        /// simulators.
        missing: &'static str,
        /// Names that would be accepted.
        example: &'static str,
    },
}

/// Resolves a target name: `cpu` becomes this machine's instruction set, and anything else is
/// written out in full, as in `cuda:sm_90a`.
///
/// ```
/// use moesaic::resolve_target;
///
/// assert_eq!(resolve_target("cpu")?.backend(), "cpu");
/// assert_eq!(resolve_target("rocm:gfx942")?.arch(), "gfx942");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// [`TargetNameError`] lists the accepted names.
pub fn resolve_target(name: &str) -> Result<Target, TargetNameError> {
    let needs = |missing, example| TargetNameError::NeedsArch {
        asked: name.to_string(),
        missing,
        example,
    };
    match name {
        "cpu" => Ok(Target::Cpu(host_isa())),
        "auto" => Err(needs(
            ", and an engine alone looks for devices",
            "cpu, cuda:sm_90a or rocm:gfx942",
        )),
        "cuda" => Err(needs(
            ", and no cuda device is here to ask",
            "cuda:sm_90a or cuda:sm_80",
        )),
        "rocm" => Err(needs(
            ", and no rocm device is here to ask",
            "rocm:gfx942 or rocm:gfx90a",
        )),
        "sim" => Err(needs("", "sim:sm_90a or sim:gfx942")),
        full => Ok(full.parse::<Target>()?),
    }
}

/// The compilers of this machine and those that `moesaic toolchain install` brought. Each one is
/// located once, at its first use.
///
/// ```
/// use moesaic::{Compilers, Training, resolve_target};
///
/// # use moesaic::example::spec;
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let (compilers, target) = (Compilers::default(), resolve_target("cpu")?);
/// println!("{}", compilers.get(target)?.name()); // gcc 12.2.0
/// let job = compilers.job(&spec(), target, Some(Training::default()))?;
/// assert_eq!(job.target, target);
/// # Ok(())
/// # }
/// ```
#[derive(Default)]
pub struct Compilers {
    store: Option<Arc<Store>>,
    found: Mutex<Vec<Arc<dyn Compiler>>>,
}

impl fmt::Debug for Compilers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Not the list of those found: another thread may hold its lock while it looks for one.
        f.debug_struct("Compilers")
            .field("store", &self.store)
            .finish_non_exhaustive()
    }
}

impl Compilers {
    /// Returns compilers that remember their versions in `store`, so the next process need not
    /// start each one to ask.
    pub fn new(store: Option<Arc<Store>>) -> Compilers {
        Compilers {
            store,
            found: Mutex::default(),
        }
    }

    /// Returns a compiler for `target`.
    ///
    /// # Errors
    /// [`CompileError::NoCompiler`] lists the places searched and the package to install.
    /// [`CompileError::UnsupportedTarget`] reports a compiler that cannot generate code for
    /// `target`.
    pub fn get(&self, target: Target) -> Result<Arc<dyn Compiler>, CompileError> {
        let mut found = self
            .found
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner());
        let known = found.iter().find(|c| is_for(&***c, target)).cloned();
        let compiler = match known {
            Some(compiler) => compiler,
            None => {
                let compiler = self.find(target)?;
                found.push(compiler.clone());
                compiler
            }
        };
        if compiler.targets().contains(&target) {
            Ok(compiler)
        } else {
            Err(unsupported(&*compiler, target))
        }
    }

    /// Returns a job for [`precompile`](crate::aot::precompile): the kernels that an engine on
    /// this machine asks for, in inference or in training. On a CPU their block sizes follow this
    /// machine's caches.
    ///
    /// # Errors
    /// The same as [`Compilers::get`].
    pub fn job(
        &self,
        spec: &LayerSpec,
        target: Target,
        training: Option<Training>,
    ) -> Result<PrecompileJob, CompileError> {
        let caches = match target {
            Target::Cpu(_) => moesaic_cpu::host_caches(),
            _ => CpuCaches::default(),
        };
        let options = PlanOptions {
            training,
            caches: CacheClass::of(caches),
            ..PlanOptions::default()
        };
        Ok(PrecompileJob {
            spec: spec.clone(),
            target,
            options,
            mesh: None,
            compiler: self.get(target)?,
        })
    }

    fn find(&self, target: Target) -> Result<Arc<dyn Compiler>, CompileError> {
        // Without a cache directory nobody can have registered a compiler, and the machine's own
        // compilers still serve.
        let registry = Registry::open().unwrap_or_else(|_| Registry::at(Path::new("")));
        Ok(match target {
            Target::Cpu(_) => Arc::new(self.cpu(&registry)?),
            Target::Cuda(_) => Arc::new(moesaic_toolchain::nvrtc(&registry)?),
            Target::Rocm(_) => Arc::new(moesaic_toolchain::rocm(&registry)?),
            Target::Sim(arch) => simulators::compiler(arch, &registry)?,
        })
    }

    /// Returns the C compiler. Its version comes from the store where it is known, and goes there
    /// otherwise.
    fn cpu(&self, registry: &Registry) -> Result<CpuCompiler, CompileError> {
        const FACT: &str = "c-compiler";
        let compiler = moesaic_toolchain::c(registry)?;
        let Some(store) = &self.store else {
            return Ok(compiler);
        };
        let remembered: Option<Identity> = store.fact(FACT);
        if remembered.is_some_and(|identity| compiler.recall(&identity)) {
            return Ok(compiler);
        }
        if let Some(identity) = compiler.identity() {
            // A store that cannot write costs the next process one more compiler start, and nothing
            // else.
            let _ = store.remember(FACT, &identity);
        }
        Ok(compiler)
    }
}

/// Returns true if `compiler` is the one to ask for `target`, even if it then refuses: each
/// simulator has its own.
fn is_for(compiler: &dyn Compiler, target: Target) -> bool {
    let own = !matches!(target, Target::Sim(_)) || compiler.targets().contains(&target);
    compiler.backend() == target.backend() && own
}

fn unsupported(compiler: &dyn Compiler, target: Target) -> CompileError {
    let names: Vec<String> = compiler.targets().iter().map(Target::to_string).collect();
    CompileError::UnsupportedTarget {
        compiler: compiler.name(),
        target: target.to_string(),
        advice: format!("it can compile for: {}", names.join(", ")),
    }
}
