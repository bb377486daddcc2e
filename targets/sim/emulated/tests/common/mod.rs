//! Small kernels, compiled and launched.

#![allow(dead_code, reason = "each test file uses its part")]

use moesaic_emulated::{EmulatedCompiler, EmulatedDevice};
use moesaic_kernel::*;
use moesaic_target::*;
use std::sync::Arc;

/// A kernel `k` with parameters `y` (f32), `count` and `by`.
pub struct Harness {
    device: EmulatedDevice,
    pub module: Arc<dyn Module>,
}

fn entry() -> Entry {
    let by = Param {
        name: "by".to_string(),
        ty: ParamType::Scalar(Scalar::F32),
        shape: String::new(),
    };
    Entry {
        symbol: "k".to_string(),
        summary: String::new(),
        params: vec![
            Param::write("y", DType::F32, "[count]"),
            Param::i64("count"),
            by,
        ],
        launch: Launch {
            grid: [Size::Tokens, Size::Const(1)],
            threads: 1,
            shared_bytes: 0,
            cluster: 1,
            dependent: false,
        },
    }
}

/// Bytes of scratch memory of a launch.
pub const SCRATCH: u32 = 128;

const TYPES: &str = "
typedef __INT64_TYPE__ i64;
typedef float vec __attribute__((vector_size(16)));
typedef unsigned short halves __attribute__((vector_size(16)));
";

const HEAD: &str = "
void k(void *const *args, i64 first, i64 last, i64 grid_x, void *scratch) {
    float *y = *(float **)args[0];
    i64 count = *(i64 *)args[1];
    float by = *(float *)args[2];
    (void)y, (void)count, (void)by, (void)first, (void)last, (void)grid_x, (void)scratch;
";

/// Returns the value found, or panics with one line that says what to install.
fn needed<T>(found: Result<T, impl std::fmt::Display>) -> T {
    found.unwrap_or_else(|error| {
        let why = error.to_string();
        let why = why.lines().next().unwrap_or_default();
        let packages = "gcc qemu-user-static gcc-aarch64-linux-gnu";
        panic!("this test needs C compilers and an emulator: apt-get install {packages}; {why}")
    })
}

impl Harness {
    pub fn new(isa: CpuIsa, body: &str) -> Harness {
        Harness::with(isa, "", body)
    }

    /// Makes a harness whose `body` follows the parameters and whose `head` holds
    /// the types.
    pub fn with(isa: CpuIsa, head: &str, body: &str) -> Harness {
        let source = KernelSource {
            stem: Stem::Dispatch,
            name: "k".to_string(),
            target: Target::Sim(SimArch::Cpu(isa)),
            language: Language::C,
            text: format!("{TYPES}{head}{HEAD}{body}\n}}\n"),
            config: String::new(),
            entries: vec![entry()],
        };
        let compiler = needed(EmulatedCompiler::find(isa, None));
        let artifact = compiler.compile(&source, &CompileOptions::default());
        let artifact = artifact.unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(artifact.report.log, "");
        let device = needed(EmulatedDevice::new(isa));
        let module = device.load(&artifact, &source.entries).unwrap();
        Harness { device, module }
    }

    fn launch(&self, grid: [u64; 2], y: Ptr, count: usize, by: f32) -> Result<(), DeviceError> {
        let dims = LaunchDims {
            grid,
            threads: 1,
            shared_bytes: SCRATCH,
            cluster: 1,
        };
        let args = [Arg::Ptr(y), Arg::I64(count as i64), Arg::F32(by)];
        // SAFETY: the kernel's memory is the emulator's own.
        unsafe { self.module.launch("k", dims, &args) }
    }

    /// Returns `count` floats after a launch; NaN where nothing was written.
    pub fn run(&self, grid: [u64; 2], count: usize, by: f32) -> Result<Vec<f32>, DeviceError> {
        let y = self.device.alloc(count * 4)?;
        self.launch(grid, y.ptr(), count, by)?;
        let mut bytes = vec![0; count * 4];
        self.device.download(&y, 0, &mut bytes)?;
        let words = bytes.as_chunks::<4>().0.iter();
        Ok(words.map(|word| f32::from_le_bytes(*word)).collect())
    }

    pub fn fails(&self, parts: &[&str]) {
        let error = self.run([1, 1], 5, 1.0).unwrap_err().to_string();
        for part in parts {
            assert!(error.contains(part), "{part:?} is not in {error}");
        }
    }
}
