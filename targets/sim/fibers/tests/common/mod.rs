//! Small kernels over the prelude, compiled and run.

#![allow(dead_code, reason = "each test file uses its part")]

use moesaic_fibers::{FiberCompiler, FiberDevice, FiberOptions, ThreadOrder};
use moesaic_kernel::*;
use moesaic_target::*;
use std::sync::{Arc, OnceLock};

pub fn arch(name: &str) -> RocmArch {
    match format!("sim:{name}").parse() {
        Ok(Target::Sim(SimArch::Rocm(arch))) => arch,
        other => panic!("{other:?}"),
    }
}

pub fn compiler() -> &'static FiberCompiler {
    static COMPILER: OnceLock<FiberCompiler> = OnceLock::new();
    COMPILER.get_or_init(|| {
        FiberCompiler::find(None).unwrap_or_else(|error| {
            let why = error.to_string();
            let why = why.lines().next().unwrap_or_default();
            panic!("this test needs a C++ compiler: apt-get install g++; {why}")
        })
    })
}

pub fn device(arch: RocmArch, threads: usize, orders: &[ThreadOrder]) -> FiberDevice {
    let orders = orders.to_vec();
    let threads = std::num::NonZeroUsize::new(threads);
    FiberDevice::new(arch, FiberOptions { threads, orders }).unwrap()
}

/// A kernel `k` with these parameters, for one GPU.
pub struct Kernel {
    pub source: KernelSource,
    pub arch: RocmArch,
}

impl Kernel {
    /// Makes a kernel whose `body` follows the prelude and declares
    /// `KERNEL(threads) k(...)`.
    pub fn new(gpu: &str, threads: u32, params: Vec<Param>, body: &str) -> Kernel {
        let arch = arch(gpu);
        let launch = Launch {
            grid: [Size::Const(1), Size::Const(1)],
            threads,
            shared_bytes: 0,
            cluster: 1,
            dependent: false,
        };
        let entry = Entry {
            symbol: "k".to_string(),
            summary: String::new(),
            params,
            launch,
        };
        let source = KernelSource {
            stem: Stem::Dispatch,
            name: "k".to_string(),
            target: Target::Sim(SimArch::Rocm(arch)),
            language: Language::Hip,
            text: prelude(arch) + body + "\nSIM_ENTRY(k)\n",
            config: String::new(),
            entries: vec![entry],
        };
        Kernel { source, arch }
    }

    pub fn compile(&self) -> Artifact {
        let options = CompileOptions::default();
        let artifact = compiler().compile(&self.source, &options).unwrap();
        assert_eq!(artifact.report.log, "", "{}", self.source.text);
        artifact
    }

    /// Returns the line on which `part` first stands.
    pub fn line(&self, part: &str) -> usize {
        let found = self
            .source
            .text
            .lines()
            .position(|line| line.contains(part));
        found.unwrap_or_else(|| panic!("no line has {part:?}")) + 1
    }

    pub fn dims(&self, blocks: u64) -> LaunchDims {
        let launch = &self.source.entries[0].launch;
        LaunchDims {
            grid: [blocks, 1],
            threads: launch.threads,
            shared_bytes: launch.shared_bytes,
            cluster: 1,
        }
    }

    /// Compiles and runs on two cores with these buffers; returns the error, if
    /// any.
    pub fn run(&self, blocks: u64, buffers: &mut [Data]) -> Result<(), String> {
        self.run_on(
            &device(self.arch, 2, &[ThreadOrder::Ascending]),
            blocks,
            buffers,
        )
    }

    pub fn run_on(
        &self,
        device: &FiberDevice,
        blocks: u64,
        buffers: &mut [Data],
    ) -> Result<(), String> {
        let module = device.load(&self.compile(), &self.source.entries);
        let module = module.map_err(|error| error.to_string())?;
        launch(device, &module, self.dims(blocks), buffers)
    }
}

/// A buffer of a test: uploaded, or written and downloaded.
pub enum Data {
    /// Bytes, uploaded.
    In(Vec<u8>),
    /// A number of bytes that the kernel writes.
    Out(Vec<u8>),
    /// A scalar.
    Count(i64),
}

impl Data {
    pub fn floats(values: &[f32]) -> Data {
        Data::In(values.iter().flat_map(|v| v.to_le_bytes()).collect())
    }

    pub fn ints(values: &[i32]) -> Data {
        Data::In(values.iter().flat_map(|v| v.to_le_bytes()).collect())
    }

    /// Returns room for a number of 4-byte elements.
    pub fn room(elements: usize) -> Data {
        Data::Out(vec![0; 4 * elements])
    }

    pub fn words(&self) -> Vec<u32> {
        let (Data::In(bytes) | Data::Out(bytes)) = self else {
            panic!("a scalar has no words")
        };
        let words = bytes.chunks_exact(4);
        words
            .map(|c| u32::from_le_bytes(c.try_into().unwrap()))
            .collect()
    }
}

/// Uploads, launches `k`, downloads.
pub fn launch(
    device: &FiberDevice,
    module: &Arc<dyn Module>,
    dims: LaunchDims,
    buffers: &mut [Data],
) -> Result<(), String> {
    let mut held = Vec::new();
    for data in buffers.iter() {
        held.push(match data {
            Data::In(bytes) => {
                let buffer = device.alloc(bytes.len()).unwrap();
                device.upload(bytes, &buffer, 0).unwrap();
                Some(buffer)
            }
            Data::Out(bytes) => Some(device.alloc(bytes.len()).unwrap()),
            Data::Count(_) => None,
        });
    }
    let pairs = buffers.iter().zip(&held);
    let args: Vec<Arg> = pairs
        .map(|(data, buffer)| match (data, buffer) {
            (Data::Count(value), _) => Arg::I64(*value),
            (_, Some(buffer)) => Arg::Ptr(buffer.ptr()),
            _ => unreachable!(),
        })
        .collect();
    // SAFETY: the test's kernel takes these buffers, which live to the end.
    unsafe { module.launch("k", dims, &args) }.map_err(|error| error.to_string())?;
    for (data, buffer) in buffers.iter_mut().zip(&held) {
        if let (Data::In(bytes) | Data::Out(bytes), Some(buffer)) = (data, buffer) {
            device.download(buffer, 0, bytes).unwrap();
        }
    }
    Ok(())
}

/// Returns the prelude of a GPU kernel on the host.
pub fn prelude(arch: RocmArch) -> String {
    rendered(arch, "prelude/base.hpp", "f32") + &rendered(arch, "prelude/warp.hpp", "f32")
}

fn rendered(arch: RocmArch, name: &str, activations: &str) -> String {
    let mut tera = tera::Tera::new();
    tera.autoescape_on(Vec::<&'static str>::new());
    tera.register_filter("f32", |value: f64, _: tera::Kwargs, _: &tera::State| {
        value.to_string()
    });
    // Names of custom activations, which no prelude of these tests has.
    for name in ["calls", "vec_value", "vec_slope", "value", "slope"] {
        tera.register_filter(name, |text: String, _: tera::Kwargs, _: &tera::State| text);
    }
    tera.add_raw_templates(moesaic_templates::GPU.iter().copied())
        .unwrap();
    let mut context = tera::Context::new();
    let target = TargetFacts {
        dialect: "sim",
        arch: arch.name,
        wave: arch.caps().wave,
        mfma_wide: arch.caps().mfma().is_some_and(|mfma| mfma.wide),
    };
    context.insert("target", &target);
    context.insert("d", &DescFacts { activations });
    // The type of a kernel's GEMMs, which its template names before it includes
    // a prelude.
    context.insert("element", activations);
    context.insert("multiplied", activations);
    tera.render(name, &context).unwrap()
}

#[derive(serde::Serialize)]
struct TargetFacts {
    dialect: &'static str,
    arch: &'static str,
    wave: u32,
    mfma_wide: bool,
}

#[derive(serde::Serialize)]
struct DescFacts<'a> {
    activations: &'a str,
}

/// Returns the matrix products of a GPU for operands of a type.
pub fn products(gpu: &str, dtype: &str) -> String {
    let name = match arch(gpu).caps().wave {
        64 => "prelude/sim/mfma.hpp",
        _ => "prelude/sim/wmma.hpp",
    };
    rendered(arch(gpu), name, dtype)
}
