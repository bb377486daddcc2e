//! The peers of a selection, started.

use crate::Result;
use crate::peer::Peer;
use crate::select::Selection;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Starts the peers of the selection; prints a line for each that is missing.
pub fn all(selection: &Selection, threads: usize) -> Vec<Peer> {
    let mut peers = Vec::new();
    for name in &selection.peers {
        match start(name, &selection.python, threads) {
            Ok((peer, title)) => {
                println!("# {name}: {title}");
                peers.push(peer);
            }
            Err(problem) => println!("# {name} is skipped: {problem}"),
        }
    }
    peers
}

fn start(name: &str, python: &str, threads: usize) -> Result<(Peer, String)> {
    let mut command = match name {
        "torch" => {
            let mut command = Command::new(python);
            command.arg(folder().join("torch_layer.py"));
            command
        }
        "gemm" | "candle" => {
            let mut command = Command::new(rust_peers()?);
            command.arg(name);
            command
        }
        _ => return Err("no such peer".into()),
    };
    let count = threads.to_string();
    command.args(["--threads", &count]);
    for variable in ["RAYON_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"] {
        command.env(variable, &count);
    }
    // Large pages, as our own memory has them.
    command.env("THP_MEM_ALLOC_ENABLE", "1");
    command.env("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1");
    Peer::spawn(name, &mut command)
}

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("peers")
}

/// Builds the peers that are written in Rust, for this machine; quick when
/// nothing has changed.
fn rust_peers() -> Result<PathBuf> {
    let folder = folder().join("rust");
    let output = Command::new("cargo")
        .args(["build", "--release", "--quiet", "--locked", "--target-dir"])
        .arg(folder.join("target"))
        .arg("--manifest-path")
        .arg(folder.join("Cargo.toml"))
        .env("RUSTFLAGS", "-C target-cpu=native")
        .output()?;
    if !output.status.success() {
        let text = String::from_utf8_lossy(&output.stderr);
        let reason = text.lines().find(|line| line.starts_with("error"));
        let reason = reason.unwrap_or("cargo failed").to_string();
        return Err(format!("cargo build in benches/peers/rust: {reason}").into());
    }
    Ok(folder.join("target/release/moesaic-peers"))
}
