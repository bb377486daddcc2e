//! What the simulators need, for `moesaic doctor`.

use moesaic::target::{CompileError, Compiler};
use moesaic::{Compilers, Target};
use serde_json::{Value, json};
use std::sync::Arc;

/// A simulator, and the compiler it runs on.
pub struct Simulator {
    /// `CUDA simulator`.
    pub subject: &'static str,
    /// What it does and needs.
    pub needs: &'static str,
    /// The compiler's name.
    pub found: Option<String>,
    /// What it can stand in for now.
    pub targets: Vec<Target>,
    /// Why there is no compiler, and what to do.
    pub trouble: Option<[String; 2]>,
}

/// Looks for what both need.
pub fn simulators() -> [Simulator; 2] {
    let compilers = Compilers::new(None);
    let look = |subject, needs, example: &str| {
        let target = example.parse::<Target>();
        let compiler = target.ok().map(|target| compilers.get(target));
        Simulator::of(subject, needs, compiler)
    };
    [
        look(
            "CUDA simulator",
            "interprets PTX; needs NVRTC, no GPU",
            "sim:sm_80",
        ),
        look(
            "ROCm simulator",
            "runs threads as fibers; needs a C++ compiler, no GPU",
            "sim:gfx942",
        ),
    ]
}

impl Simulator {
    fn of(
        subject: &'static str,
        needs: &'static str,
        compiler: Option<Result<Arc<dyn Compiler>, CompileError>>,
    ) -> Simulator {
        let mut simulator = Simulator {
            subject,
            needs,
            found: None,
            targets: Vec::new(),
            trouble: None,
        };
        match compiler {
            Some(Ok(compiler)) => {
                simulator.found = Some(compiler.name());
                simulator.targets = compiler.targets();
            }
            Some(Err(error)) => simulator.trouble = Some(reasons(error)),
            None => {}
        }
        simulator
    }

    /// For scripts.
    pub fn json(&self) -> Value {
        let targets: Vec<String> = self.targets.iter().map(Target::to_string).collect();
        let trouble = self.trouble.as_ref();
        json!({
            "subject": self.subject,
            "needs": self.needs,
            "found": self.found,
            "targets": targets,
            "tried": trouble.map(|[tried, _]| tried),
            "advice": trouble.map(|[_, advice]| advice),
        })
    }
}

fn reasons(error: CompileError) -> [String; 2] {
    match error {
        CompileError::NoCompiler { tried, advice, .. } => [tried, advice],
        error => [error.to_string(), String::new()],
    }
}
