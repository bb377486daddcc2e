//! Errors of the parts below the engine, which the errors of this crate carry.

/// The failure of a device, or the reason that there is none.
///
/// ```
/// use moesaic::{DeviceError, Engine, EngineOptions, OpenError};
///
/// /// Opens a GPU, or the CPU where there is none.
/// fn open() -> Result<Engine, OpenError> {
///     match Engine::open("cuda", EngineOptions::default()) {
///         Err(OpenError::Device(DeviceError::Unavailable { .. })) => Engine::cpu(),
///         opened => opened,
///     }
/// }
/// # assert!(open().is_ok());
/// ```
#[doc(inline)]
pub use moesaic_target::DeviceError;
#[doc(inline)]
pub use moesaic_target::UnavailableReason;

/// The reason that a kernel does not compile, or that its compiler is missing.
///
/// ```
/// use moesaic::{CompileError, Compilers, Target};
///
/// /// Returns true if a compiler for the target is on this machine.
/// fn compiles(compilers: &Compilers, target: Target) -> bool {
///     !matches!(compilers.get(target), Err(CompileError::NoCompiler { .. }))
/// }
/// # let _ = compiles;
/// ```
#[doc(inline)]
pub use moesaic_target::CompileError;

/// The reason that a layer cannot be planned, or that its kernels cannot be written.
///
/// ```
/// use moesaic::EngineError;
///
/// /// Returns true for errors that another spec or other options would mend.
/// fn is_of_the_spec(error: &EngineError) -> bool {
///     matches!(error, EngineError::Spec(_) | EngineError::Plan(_))
/// }
/// # let _ = is_of_the_spec;
/// ```
#[doc(inline)]
pub use moesaic_plan::PlanError;

/// A defect in a template of kernels, which no spec should be able to cause.
///
/// ```
/// use moesaic::EmitError;
///
/// let report = |error: &EmitError| format!("{} for {}", error.kernel, error.target);
/// # let _ = report;
/// ```
#[doc(inline)]
pub use moesaic_emit::EmitError;

/// A target's name that does not exist, with a hint and every name that does.
///
/// ```
/// use moesaic::{Target, TargetError};
///
/// let error: TargetError = "cuda:sm_1".parse::<Target>().unwrap_err();
/// assert!(error.known.contains("cuda:sm_90a"));
/// ```
#[doc(inline)]
pub use moesaic_kernel::TargetError;
