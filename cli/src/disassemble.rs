//! Disassembly of machine code by an installed disassembler.

use crate::failure::{Failure, Result};
use moesaic::Target;
use moesaic::target::{Artifact, Scratch};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// A disassembler that may be installed.
struct Tool {
    program: String,
    args: &'static [&'static str],
    /// Folders to search besides PATH.
    folders: Vec<PathBuf>,
}

/// Returns the disassembly of a binary.
///
/// # Errors
/// Fails if no tool for the target is found or none can read the binary; the
/// message names each that was tried.
pub fn disassemble(target: Target, artifact: &Artifact) -> Result<String> {
    if let Target::Sim(_) = target {
        let message = format!("`{target}` is a simulator: its kernels have no machine code");
        return Err(Failure::input(message).hint(advice(target)));
    }
    let folder = Scratch::new().map_err(unwritten)?;
    let file = folder.path().join("kernel");
    std::fs::write(&file, &artifact.binary).map_err(unwritten)?;
    let mut tried = Vec::new();
    for tool in tools(target) {
        match tool.run(&file) {
            Ok(text) => return Ok(tidy(&text)),
            Err(reason) => tried.push(format!("{} ({reason})", tool.program)),
        }
    }
    let message = format!(
        "no disassembler for `{}`; tried: {}",
        target.backend(),
        tried.join(", ")
    );
    Err(Failure::input(message).hint(advice(target)))
}

fn unwritten(error: std::io::Error) -> Failure {
    Failure::work(format!("cannot write a temporary file: {error}"))
}

fn advice(target: Target) -> &'static str {
    match target {
        Target::Cpu(_) => "install binutils (objdump) or LLVM (llvm-objdump)",
        Target::Cuda(_) => {
            "nvdisasm and cuobjdump come with the CUDA toolkit; put one on PATH or set CUDA_HOME"
        }
        Target::Sim(_) => "--source shows the text that a simulator runs",
        Target::Rocm(_) => "install LLVM (llvm-objdump) with the AMDGPU target, or set ROCM_PATH",
    }
}

const GNU: &[&str] = &["-d", "--no-show-raw-insn", "-j", ".text"];
const LLVM: &[&str] = &["-d", "--no-show-raw-insn", "--section=.text"];

fn tools(target: Target) -> Vec<Tool> {
    match target {
        Target::Cpu(_) => {
            let gnu = Tool {
                program: "objdump".to_string(),
                args: GNU,
                folders: Vec::new(),
            };
            [gnu].into_iter().chain(llvm(&[])).collect()
        }
        Target::Cuda(_) => {
            let folders = below(&["CUDA_HOME", "CUDA_PATH"], "/usr/local/cuda", &["bin"]);
            let tool = |name: &str, args| Tool {
                program: name.to_string(),
                args,
                folders: folders.clone(),
            };
            vec![tool("nvdisasm", &["-c"]), tool("cuobjdump", &["-sass"])]
        }
        Target::Sim(_) => Vec::new(),
        Target::Rocm(_) => llvm(&below(
            &["ROCM_PATH"],
            "/opt/rocm",
            &["llvm/bin", "lib/llvm/bin"],
        )),
    }
}

/// Lists LLVM's objdumps, newest first, because older ones do not know newer GPUs.
fn llvm(folders: &[PathBuf]) -> Vec<Tool> {
    let versions = (15..=24)
        .rev()
        .map(|version| format!("llvm-objdump-{version}"));
    let names = versions.filter(|name| find(name, folders).is_some());
    let plain = std::iter::once("llvm-objdump".to_string());
    let tool = |program| Tool {
        program,
        args: LLVM,
        folders: folders.to_vec(),
    };
    names.chain(plain).map(tool).collect()
}

fn below(variables: &[&str], default: &str, parts: &[&str]) -> Vec<PathBuf> {
    let set = variables
        .iter()
        .filter_map(std::env::var_os)
        .map(PathBuf::from);
    let roots = set.chain([PathBuf::from(default)]);
    roots
        .flat_map(|root| parts.iter().map(move |part| root.join(part)))
        .collect()
}

fn find(program: &str, folders: &[PathBuf]) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let on_path = std::env::split_paths(&path);
    let places = on_path.chain(folders.iter().cloned());
    places
        .map(|folder| folder.join(program))
        .find(|file| file.is_file())
}

impl Tool {
    fn run(&self, file: &Path) -> std::result::Result<String, String> {
        let program = find(&self.program, &self.folders).ok_or("not found")?;
        let output = Command::new(program)
            .args(self.args)
            .arg(file)
            .stdin(Stdio::null())
            .output()
            .map_err(|error| error.to_string())?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        if output.status.success() && text.lines().count() > 4 {
            Ok(text)
        } else {
            Err(complaint(&output.stderr))
        }
    }
}

/// Returns the last line of a tool's error output.
fn complaint(stderr: &[u8]) -> String {
    let text = String::from_utf8_lossy(stderr);
    match text.lines().rev().find(|line| !line.trim().is_empty()) {
        Some(line) => format!("says: {}", line.trim()),
        None => "cannot read the binary".to_string(),
    }
}

/// Removes the name of the temporary file, and the padding that AMD's instruction fetch needs after
/// the last kernel.
fn tidy(text: &str) -> String {
    let named = |line: &&str| !line.contains("file format");
    let mut lines: Vec<&str> = text.lines().filter(named).collect();
    let padding = |line: &str| {
        let line = line.trim();
        line.is_empty() || line.starts_with("s_nop 0") || line.starts_with("s_code_end")
    };
    while lines.last().is_some_and(|line| padding(line)) {
        lines.pop();
    }
    lines.join("\n").trim_start().to_string() + "\n"
}
