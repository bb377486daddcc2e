//! The simulators and their requirements, for `moesaic doctor`.

use moesaic::target::{CompileError, Compiler};
use moesaic::{Compilers, Engine, EngineOptions, OpenError, Target};
use serde_json::{Value, json};
use std::sync::Arc;

/// A simulator, and the compiler it runs on.
pub struct SimulatorSetup {
    /// The name, such as `CUDA simulator`.
    pub subject: &'static str,
    /// A description of the simulator and its requirements.
    pub needs: &'static str,
    /// The name of the compiler, if one was found.
    pub found: Option<String>,
    /// The targets that the simulator runs on this machine.
    pub targets: Vec<Target>,
    /// The reason why there is no compiler, and advice.
    pub trouble: Option<[String; 2]>,
}

/// Looks for the requirements of every simulator.
pub fn simulators() -> [SimulatorSetup; 4] {
    let compilers = Compilers::new(None);
    let look = |subject, needs, example: &str| {
        let target = example.parse::<Target>();
        let compiler = target.ok().map(|target| compilers.get(target));
        SimulatorSetup::of(subject, needs, compiler).opened(example)
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
        look(
            "aarch64 emulator",
            "runs NEON kernels under QEMU; needs qemu-user-static and a compiler for aarch64",
            "sim:neon",
        ),
        look(
            "AMX emulator",
            "runs AMX tiles on a CPU without; needs Linux, AVX-512 and a C compiler",
            "sim:amx",
        ),
    ]
}

impl SimulatorSetup {
    fn of(
        subject: &'static str,
        needs: &'static str,
        compiler: Option<Result<Arc<dyn Compiler>, CompileError>>,
    ) -> SimulatorSetup {
        let mut simulator = SimulatorSetup {
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

    /// Returns the simulator if its device opens, and otherwise reports the device's error. An
    /// emulator is a separate program, which may be missing where the compiler is not.
    fn opened(mut self, example: &str) -> SimulatorSetup {
        let options = EngineOptions {
            store: None,
            ..EngineOptions::default()
        };
        if let Err(OpenError::Device(error)) = Engine::open(example, options) {
            self.found = None;
            self.trouble = Some([error.to_string(), String::new()]);
        }
        self
    }

    /// Returns the simulator as JSON, for scripts.
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
