//! Small kernels in C and their sources, as codegen would return them.

#![allow(dead_code, reason = "each test file uses its part")]

use moesaic_cpu::{CpuCompiler, host_isa};
use moesaic_kernel::{
    CpuIsa, DType, Entry, KernelSource, Language, Launch, Param, ParamType, Scalar, Size, Stem,
    Target,
};
use moesaic_target::{Artifact, CompileError, CompileOptions, Compiler};

/// `y[b * width + i] = x[...] * scale + b` for every block b, and the grid's
/// shape in `seen[b]`.
pub const SCALE: &str = "
typedef __INT64_TYPE__ i64;
void scale(void *const *args, i64 first, i64 last, i64 grid_x) {
  const float *x = *(const float **)args[0];
  float *y = *(float **)args[1];
  i64 *seen = *(i64 **)args[2];
  i64 width = *(i64 *)args[3];
  float by = *(float *)args[4];
  for (i64 b = first; b < last; ++b) {
    seen[b] = b / grid_x * 1000 + b % grid_x;
    for (i64 i = b * width; i < (b + 1) * width; ++i) y[i] = x[i] * by + (float)b;
  }
}
";

pub fn entry(symbol: &str, params: Vec<Param>) -> Entry {
    let launch = Launch {
        grid: [Size::Tokens, Size::Const(1)],
        threads: 1,
        shared_bytes: 0,
        cluster: 1,
        dependent: false,
    };
    Entry {
        symbol: symbol.to_string(),
        summary: "A test.".to_string(),
        params,
        launch,
    }
}

pub fn scale_entry() -> Entry {
    let by = Param {
        name: "by".to_string(),
        ty: ParamType::Scalar(Scalar::F32),
        shape: String::new(),
    };
    let params = vec![
        Param::read("x", DType::F32, "[blocks, width]"),
        Param::write("y", DType::F32, "[blocks, width]"),
        Param::write("seen", DType::I64, "[blocks]"),
        Param::i64("width"),
        by,
    ];
    entry("scale", params)
}

pub fn source(isa: CpuIsa, text: &str, entries: Vec<Entry>) -> KernelSource {
    KernelSource {
        stem: Stem::Dispatch,
        name: "dispatch_test".to_string(),
        target: Target::Cpu(isa),
        language: Language::C,
        text: text.to_string(),
        config: String::new(),
        entries,
    }
}

pub fn compiler() -> CpuCompiler {
    CpuCompiler::find(None).expect("the tests of the CPU target need a C compiler")
}

pub fn compile(text: &str, entries: Vec<Entry>) -> Result<Artifact, CompileError> {
    compiler().compile(
        &source(host_isa(), text, entries),
        &CompileOptions::default(),
    )
}
