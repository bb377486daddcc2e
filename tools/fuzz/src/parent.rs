//! Runs one child per kind of input, and again after a crash.

use crate::Options;
use moesaic_fuzz::{input, surface, surfaces};
use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Instant;

/// Number of failures of one kind after which a run ends; more teach nothing
/// new.
const ENOUGH: usize = 20;

/// Runs the children; returns true if nothing failed.
pub fn run(options: &Options) -> Result<bool, String> {
    fs::create_dir_all(&options.out)
        .map_err(|error| format!("{}: {error}", options.out.display()))?;
    let start = Instant::now();
    let mut well = true;
    for file in &options.files {
        let arguments = ["--file".to_string(), file.display().to_string()];
        let done = child(options, &arguments)?;
        if done != Some(0) {
            eprintln!("{} fails", file.display());
            well = false;
        }
    }
    if !options.files.is_empty() {
        return Ok(well);
    }
    let mut total = 0;
    for surface in surfaces() {
        let count = match &options.surface {
            Some(name) if name == surface.name() => options.inputs,
            Some(_) => continue,
            None => (options.inputs * surface.share()).div_ceil(1000),
        };
        well &= one(options, surface.name(), count)?;
        total += count;
    }
    println!(
        "{total} inputs of seed {} in {:.1} s",
        options.seed,
        start.elapsed().as_secs_f64()
    );
    Ok(well)
}

fn one(options: &Options, name: &str, count: u64) -> Result<bool, String> {
    let (mut first, end) = (options.first, options.first + count);
    let mut crashes = 0;
    let mut well = true;
    while first < end && crashes < ENOUGH {
        let words = [
            ("--surface", name.to_string()),
            ("--first", first.to_string()),
            ("--inputs", (end - first).to_string()),
            ("--seed", options.seed.to_string()),
            ("--out", options.out.display().to_string()),
        ];
        let words = words
            .into_iter()
            .flat_map(|(flag, value)| [flag.to_string(), value]);
        match child(options, &words.collect::<Vec<_>>())? {
            Some(code @ (0 | 1)) => return Ok(well && code == 0),
            Some(code) => return Err(format!("the child of {name} ended with {code}")),
            None => {
                let number = position(options).unwrap_or(first);
                let mut surface = surface(name).ok_or("the surface is known")?;
                let bytes = input(&mut *surface, options.seed, number);
                let path = kept(options, name, number, &bytes)?;
                println!(
                    "FAILED {name}, seed {}, input {number}: it crashed; {path}",
                    options.seed
                );
                (first, well) = (number + 1, false);
                crashes += 1;
            }
        }
    }
    Ok(well)
}

/// Returns the exit code, or `None` for a crash.
fn child(options: &Options, words: &[String]) -> Result<Option<i32>, String> {
    let program = std::env::current_exe().map_err(|error| error.to_string())?;
    let mut command = Command::new(program);
    command.args(words).arg("--at").arg(options.out.join("at"));
    Ok(command.status().map_err(|error| error.to_string())?.code())
}

fn position(options: &Options) -> Option<u64> {
    let bytes = fs::read(options.out.join("at")).ok()?;
    Some(u64::from_le_bytes(*bytes.first_chunk()?))
}

/// Writes a failing input; returns the command that runs it again.
pub fn kept(options: &Options, name: &str, number: u64, bytes: &[u8]) -> Result<String, String> {
    let folder = options.out.join(name);
    let path = folder.join(format!("{}-{number}", options.seed));
    let write = |folder: &Path| fs::create_dir_all(folder).and_then(|()| fs::write(&path, bytes));
    write(&folder).map_err(|error| format!("{}: {error}", path.display()))?;
    Ok(format!("cargo xtask fuzz --file {}", path.display()))
}
