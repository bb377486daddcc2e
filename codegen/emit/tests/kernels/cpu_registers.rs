//! The sums of CPU GEMMs stay in registers: gcc's assembly of each kernel, with
//! the flags that kernels are compiled with, has no loop of multiply-adds that
//! also goes to the stack with a vector. A spill there costs up to half the speed.

use super::narrower::own;
use moesaic_cpu::compile_flags;
use moesaic_emit::emit_layer;
use moesaic_harness::thorough::in_turns;
use moesaic_kernel::{CpuIsa, DType, KernelSource, Target};
use moesaic_plan::{PlanOptions, Training, plan};
use moesaic_spec::LayerSpec;
use std::ops::Range;
use std::process::{Command, Stdio};

/// Multiply-adds from which on a loop is that of a register tile.
const TILE: usize = 8;

/// Functions that are not GEMMs: their loops have an activation's polynomial.
const OTHERS: [&str; 1] = ["finish_sums"];

/// A loop: its function, its multiply-adds, and instructions that have a
/// vector and the stack.
#[derive(Debug)]
struct Loop {
    function: String,
    products: usize,
    spills: Vec<String>,
}

/// The loops of an assembly text that have no loop inside and are of register tiles.
fn loops(assembly: &str) -> Vec<Loop> {
    let lines: Vec<&str> = assembly.lines().map(str::trim).collect();
    let all: Vec<Range<usize>> = (0..lines.len()).filter_map(|i| back(&lines, i)).collect();
    let inner = |range: &&Range<usize>| {
        !all.iter()
            .any(|o| o != *range && o.start >= range.start && o.end <= range.end)
    };
    all.iter()
        .filter(inner)
        .map(|range| one(&lines, range.clone()))
        .filter(|found| found.products >= TILE)
        .collect()
}

/// From a label to the jump in line `end` that goes back to it.
fn back(lines: &[&str], end: usize) -> Option<Range<usize>> {
    let (name, label) = lines[end].split_once(char::is_whitespace)?;
    if !name.starts_with(['j', 'b', 'c', 't']) || !label.contains(".L") {
        return None;
    }
    let label = format!("{}:", &label[label.find(".L")?..]);
    let start = lines[..end].iter().rposition(|line| *line == label)?;
    let entry = lines[..end]
        .iter()
        .rposition(|line| function(line).is_some())?;
    (start > entry).then_some(start..end + 1)
}

/// The name of the function that begins in this line.
fn function(line: &str) -> Option<&str> {
    let name = line.strip_suffix(':')?;
    (!name.starts_with('.') && !name.contains(char::is_whitespace)).then_some(name)
}

fn one(lines: &[&str], range: Range<usize>) -> Loop {
    let names = lines[..range.start].iter().rev();
    let is_product = |line: &&&str| {
        let name = line.split_whitespace().next().unwrap_or_default();
        ["vfmadd", "vfnmadd", "vdpbf16", "fmla", "bfmmla", "bfdot"]
            .iter()
            .any(|product| name.starts_with(product))
    };
    let is_spill = |line: &&&str| {
        let intel = line.contains("sp)") && (line.contains("%y") || line.contains("%z"));
        let arm = line.contains("[sp") && line.split([' ', '\t', ',']).any(is_arm_vector);
        intel || arm
    };
    let body = &lines[range];
    Loop {
        function: { names }
            .find_map(|line| function(line))
            .unwrap_or("")
            .to_string(),
        products: body.iter().filter(is_product).count(),
        spills: body
            .iter()
            .filter(is_spill)
            .map(|line| line.to_string())
            .collect(),
    }
}

fn is_arm_vector(word: &str) -> bool {
    let number = word.strip_prefix(['q', 'd', 's', 'v']);
    number.is_some_and(|n| n.starts_with(|c: char| c.is_ascii_digit()))
}

/// The GEMMs of a layer, forward and training.
fn products(isa: CpuIsa, dtype: DType) -> Vec<KernelSource> {
    let dtype = dtype.name();
    let spec: LayerSpec = serde_json::from_str(&format!(
        r#"{{"shape":{{"model_dim":2048,"hidden_dim":768,"experts":8,"top_k":2}},
            "precision":{{"weights":"{dtype}","activations":"{dtype}"}}}}"#
    ))
    .unwrap();
    let forward = plan(&spec, Target::Cpu(isa), &PlanOptions::default()).unwrap();
    let training = plan(
        &spec,
        Target::Cpu(isa),
        &PlanOptions::training(Training::default()),
    )
    .unwrap();
    let sources = [forward, training].map(|plan| emit_layer(&plan).unwrap());
    let is_product = |source: &KernelSource| source.name.starts_with("grouped_gemm");
    sources.into_iter().flatten().filter(is_product).collect()
}

fn assembly(gcc: &str, isa: CpuIsa, text: &str) -> String {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("kernel.c"), text).unwrap();
    let output = Command::new(gcc)
        .args(compile_flags(isa))
        .args(["-w", "-S", "-o", "-", "kernel.c"])
        .current_dir(dir.path())
        .output()
        .unwrap();
    let log = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{gcc}, {isa:?}:\n{log}");
    String::from_utf8(output.stdout).unwrap()
}

/// gcc for the instruction set's machine; none for x86-64 elsewhere, where nothing
/// is installed for it.
fn gcc(isa: CpuIsa) -> Option<&'static str> {
    let arm = matches!(isa, CpuIsa::Neon | CpuIsa::NeonBf16);
    let name = match arm == cfg!(target_arch = "aarch64") {
        true => "gcc",
        false if arm => "aarch64-linux-gnu-gcc",
        false => return None,
    };
    let mut command = Command::new(name);
    command
        .arg("--version")
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    let works = command.status().is_ok_and(|status| status.success());
    assert!(
        works,
        "no {name}; `cargo xtask test` installs that for aarch64"
    );
    Some(name)
}

/// No vector goes to the stack in a round of a loop.
fn check(isa: CpuIsa) {
    let Some(gcc) = gcc(isa) else {
        println!("no gcc here for {isa:?}");
        return;
    };
    let mut looked_at = 0;
    // bf16 is first, because some sets have products of their own in that alone.
    for dtype in in_turns(isa as usize, [DType::Bf16, DType::F32, DType::F16]) {
        for source in own(isa, |isa| products(isa, dtype), |source| &source.text) {
            looked_at += 1;
            let found = loops(&assembly(gcc, isa, &source.text));
            let found: Vec<Loop> = { found.into_iter() }
                .filter(|l| !OTHERS.iter().any(|other| l.function.starts_with(other)))
                .collect();
            assert!(!found.is_empty(), "{dtype}, {}: no products", source.name);
            for one in found {
                let what = format!("{isa:?}, {dtype}, {}: {one:#?}", source.name);
                assert!(one.spills.is_empty(), "{what}");
            }
        }
    }
    assert!(looked_at > 0, "{isa:?} has no products of its own");
}

#[test]
fn a_loop_that_spills_is_found() {
    let text = "multiply_rows:\n.L3:\n vmovaps %ymm1, 8(%rsp)\n".to_string()
        + &" vfmadd231ps %ymm1, %ymm2, %ymm3\n".repeat(12)
        + " jne .L3\n ret\nfinish_sums:\n.L4:\n jmp .L4\n";
    let found = loops(&text);
    assert_eq!(found.len(), 1, "{found:?}");
    assert_eq!(found[0].function, "multiply_rows");
    assert_eq!((found[0].products, found[0].spills.len()), (12, 1));
}

#[test]
fn sums_stay_in_registers_of_avx2() {
    check(CpuIsa::Avx2);
}

#[test]
fn sums_stay_in_registers_of_avx512() {
    check(CpuIsa::Avx512);
}

#[test]
fn sums_stay_in_registers_of_avx512bf16() {
    check(CpuIsa::Avx512Bf16);
}

#[test]
fn sums_stay_in_registers_of_neon() {
    check(CpuIsa::Neon);
}

#[test]
fn sums_stay_in_registers_of_neonbf16() {
    check(CpuIsa::NeonBf16);
}
