//! `gpu-smoke`: a folder for a machine that has a GPU, its driver and nothing else.

use super::{CARGO, archive, root, run, target};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

const HELP: &str = "\
usage: cargo xtask gpu-smoke [OPTIONS]

  --target T      what kernels are compiled for                 [cuda:sm_90a]
  --out DIR       the folder, made anew                       [target/gpu-smoke]
  --tiny          the few kernels of `run.sh --tiny`
  --program PATH  moesaic-gpu-smoke as it is, instead of one for glibc 2.31

Needs NVRTC, and for the program zig: MOESAIC_ZIG, `zig` on PATH, or by pip.";

/// The oldest C library that the program runs on.
const GLIBC: (u32, u32) = (2, 31);

/// The most bytes of a folder, so that it can be carried to another machine.
const MOST_BYTES: u64 = 60 << 20;

/// The C compiler that links against any release of glibc.
const ZIG: &str = "ziglang==0.17.0";

const TRIPLE: &str = "x86_64-unknown-linux-gnu";

/// Archives of the oracles' fixtures.
const DATA: [&str; 5] = ["hf", "hf_more", "families", "families_limits", "tutel"];

struct Options {
    target: String,
    out: PathBuf,
    tiny: bool,
    program: Option<PathBuf>,
}

/// Makes the folder.
pub fn folder(arguments: impl Iterator<Item = String>) -> Result<(), String> {
    let root = root();
    let root = root.canonicalize().map_err(|error| error.to_string())?;
    let options = Options::parse(arguments, &root)?;
    let program = match &options.program {
        Some(program) => program.clone(),
        None => built(&root)?,
    };
    let out = &options.out;
    // Only what an earlier run made: a folder with other things in it is left alone.
    if out.join("run.sh").exists() {
        fs::remove_dir_all(out).map_err(|error| format!("{}: {error}", out.display()))?;
    }
    copy(&program, &out.join("moesaic-gpu-smoke"))?;
    copy(&root.join("tools/gpu-smoke/run.sh"), &out.join("run.sh"))?;
    let peer = "torch_layer.py";
    copy(
        &root.join("benches/peers").join(peer),
        &out.join("peers").join(peer),
    )?;
    for folder in DATA {
        let path = root.join("tests/oracle").join(folder).with_extension("tar");
        let bytes = fs::read(&path).map_err(|error| format!("{}: {error}", path.display()))?;
        archive::unpack(&bytes, &out.join("data").join(folder))
            .map_err(|error| format!("{}: {error}", path.display()))?;
    }
    fs::write(out.join("version"), version(&root)).map_err(|error| error.to_string())?;
    kernels(&options)?;
    let bytes = size(out);
    println!("{} MiB in {}", bytes.div_ceil(1 << 20), out.display());
    // A program that was given is as large as it is.
    if bytes <= MOST_BYTES || options.program.is_some() {
        Ok(())
    } else {
        Err(format!("more than {} MiB", MOST_BYTES >> 20))
    }
}

impl Options {
    fn parse(mut words: impl Iterator<Item = String>, root: &Path) -> Result<Options, String> {
        let mut options = Options {
            target: "cuda:sm_90a".to_string(),
            out: root.join("target/gpu-smoke"),
            tiny: false,
            program: None,
        };
        while let Some(word) = words.next() {
            if word == "--tiny" {
                options.tiny = true;
                continue;
            }
            let value = words.next().ok_or_else(|| HELP.to_string())?;
            match word.as_str() {
                "--target" => options.target = value,
                "--out" => options.out = value.into(),
                "--program" => options.program = Some(value.into()),
                _ => return Err(HELP.to_string()),
            }
        }
        Ok(options)
    }
}

/// The program for [`GLIBC`].
fn built(root: &Path) -> Result<PathBuf, String> {
    let linker = linker(root)?;
    let arguments = [
        "build",
        "--release",
        "--package",
        "moesaic-gpu-smoke",
        "--target",
        TRIPLE,
    ];
    run(Command::new(CARGO)
        .args(arguments)
        .current_dir(root)
        .env("CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_LINKER", linker)
        .env("CARGO_PROFILE_RELEASE_DEBUG", "0")
        .env("CARGO_PROFILE_RELEASE_STRIP", "symbols"))?;
    let program = target(root).join(TRIPLE).join("release/moesaic-gpu-smoke");
    let bytes = fs::read(&program).map_err(|error| format!("{}: {error}", program.display()))?;
    match newest_glibc(&bytes) {
        Some(newest) if newest <= GLIBC => {
            println!("the program needs glibc {}.{}", newest.0, newest.1);
            Ok(program)
        }
        other => Err(format!(
            "the program needs glibc {other:?}, {GLIBC:?} is the most"
        )),
    }
}

/// A script that is what rustc takes for `cc`.
fn linker(root: &Path) -> Result<PathBuf, String> {
    let zig = zig(&target(root))?;
    let script = target(root).join("gpu-smoke-cc");
    let (zig, (major, minor)) = (zig.display(), GLIBC);
    let text =
        format!("#!/bin/sh\nexec '{zig}' cc -target x86_64-linux-gnu.{major}.{minor} \"$@\"\n");
    fs::write(&script, text).map_err(|error| error.to_string())?;
    run(Command::new("chmod").arg("+x").arg(&script))?;
    Ok(script)
}

/// The whole of zig: `moesaic toolchain install` keeps its program alone, which cannot link.
fn zig(target: &Path) -> Result<PathBuf, String> {
    if let Some(zig) = std::env::var_os("MOESAIC_ZIG").map(PathBuf::from) {
        // One without its folder `lib` says so here, and not in the middle of a build.
        let able = Command::new(&zig).arg("env").output();
        if able.is_ok_and(|output| output.status.success()) {
            return Ok(zig);
        }
        return Err(format!(
            "MOESAIC_ZIG: {} is not all of zig; without it {ZIG} comes by pip",
            zig.display()
        ));
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    let mut there = std::env::split_paths(&path).map(|folder| folder.join("zig"));
    if let Some(zig) = there.find(|zig| zig.is_file()) {
        return Ok(zig);
    }
    let folder = target.join("zig");
    let zig = folder.join("ziglang/zig");
    if !zig.is_file() {
        let pip = ["-m", "pip", "install", "--quiet", "--no-deps", "--target"];
        run(Command::new("python3").args(pip).arg(&folder).arg(ZIG))?;
    }
    Ok(zig)
}

/// The newest release of glibc that a binary names as the version of a symbol.
fn newest_glibc(binary: &[u8]) -> Option<(u32, u32)> {
    const NAME: &[u8] = b"GLIBC_";
    let at = binary.windows(NAME.len()).enumerate();
    let at = at
        .filter(|(_, window)| *window == NAME)
        .map(|(at, _)| at + NAME.len());
    at.filter_map(|at| {
        let rest = binary[at..].iter().take(8).take_while(|byte| **byte != 0);
        let text: String = rest.map(|byte| char::from(*byte)).collect();
        let mut numbers = text.split('.').map(|number| number.parse().ok());
        Some((numbers.next()??, numbers.next()??))
    })
    .max()
}

fn kernels(options: &Options) -> Result<(), String> {
    let mut command = Command::new(options.out.join("moesaic-gpu-smoke"));
    command.args(["compile", "--target", &options.target]);
    command.arg("--data").arg(options.out.join("data"));
    command.arg("--out").arg(options.out.join("kernels"));
    run(command.args(options.tiny.then_some("--tiny")))
}

/// The commit, with a plus where files differ from it.
fn version(root: &Path) -> String {
    let git = |words: &[&str]| {
        let output = Command::new("git").args(words).current_dir(root).output();
        output
            .ok()
            .map(|output| String::from_utf8_lossy(&output.stdout).trim().to_string())
    };
    let commit = git(&["rev-parse", "--short=12", "HEAD"]).unwrap_or_default();
    let changed = git(&["status", "--porcelain"]).is_some_and(|files| !files.is_empty());
    format!("{commit}{}\n", if changed { "+" } else { "" })
}

fn copy(from: &Path, to: &Path) -> Result<(), String> {
    let parent = to.parent().unwrap_or(Path::new("."));
    let copied = fs::create_dir_all(parent).and_then(|()| fs::copy(from, to));
    copied
        .map(drop)
        .map_err(|error| format!("{} to {}: {error}", from.display(), to.display()))
}

fn entries(folder: &Path) -> Result<Vec<PathBuf>, String> {
    let read = fs::read_dir(folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    Ok(read.flatten().map(|entry| entry.path()).collect())
}

fn size(folder: &Path) -> u64 {
    let each = entries(folder).unwrap_or_default().into_iter();
    let bytes = each.map(|path| {
        if path.is_dir() {
            size(&path)
        } else {
            fs::metadata(&path).map_or(0, |data| data.len())
        }
    });
    bytes.sum()
}

#[cfg(test)]
mod tests {
    use super::newest_glibc;

    #[test]
    fn the_newest_version_of_a_symbol_counts() {
        let names = b"\0GLIBC_2.2.5\0x\0GLIBC_2.31\0GLIBC_2.4\0GLIBC_PRIVATE\0libc.so.6";
        assert_eq!(newest_glibc(names), Some((2, 31)));
        assert_eq!(newest_glibc(b"nothing"), None);
    }
}
