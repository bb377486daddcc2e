//! Words of the command line: lists, meshes, targets, sizes.

use super::{Surface, promise};
use crate::mutate;
use moesaic_spec::testing::SampleRng;
use std::ffi::OsString;

/// A surface of commands, a word per line.
pub struct Words {
    commands: Vec<String>,
}

/// Whole commands in common use.
const COMMANDS: [&str; 12] = [
    "bench --spec a.toml --tokens 1,64,1024 --seconds 0.5 --skew zipf:1.2 --target cpu",
    "bench --hf models/a --layer 3 --precision bf16 --tokens 4096 --machine H100 --json",
    "tune --spec a.toml --tokens 1,64 --training=hidden --seconds 0.1",
    "precompile --spec a.toml,b.toml --target cuda:sm_80,rocm:gfx942,cpu:avx2 -o pack.tar.gz",
    "precompile --spec a.toml --target cpu --mesh ep=4,expert_tp=2,dp=1 --l1 32KiB --l2 1.5MiB -j 2",
    "inspect --spec a.toml --target sim:sm_90a --mesh ep=2,expert_tp=2,shared=sharded --rank 1",
    "inspect --spec a.toml --target cuda:sm_90a --kernel grouped_gemm --asm",
    "emit --spec a.toml --target cuda:sm_100f,rocm:gfx1201 -o out",
    "run --spec a.toml --weights w --input x --output y --ranks 4 --mesh ep=4 --target auto",
    "cache prune --max-size 500MB --max-age 30d",
    "experts add --spec a.toml --weights w --copy 0,3,3 --margin -2.5 --tokens 64 -o b",
    "launch -n 4 --grace 2.5 --bind cores -- program --tokens 1,2",
];

/// Parts of such words.
const PIECES: &[&str] = &[
    ",",
    "1,64,",
    "=",
    "ep=",
    "ep=2",
    ",expert_tp=2",
    "dp=0",
    "cuda:",
    "cuda:sm_90a",
    "rocm:gfx942",
    "sim:",
    "cpu:avx512",
    "auto",
    "zipf:",
    "nan",
    "inf",
    "KiB",
    "GiB",
    "18446744073709551615",
    "e300",
    "d",
    "\n--tokens\n",
    "\n--target\n",
    "\n--mesh\n",
    "\n--max-size\n",
    "\n--json\n",
    "\n--\n",
    "--tokens=",
    "--mesh=",
    "\n-j\n",
    "\n--help\n",
    "--",
    "-",
];

/// Options whose value is a list of numbers.
const LISTS: [&str; 3] = ["--tokens", "--copy", "--counts"];

impl Words {
    /// Makes a surface with commands in common use.
    pub fn new() -> Words {
        Words {
            commands: COMMANDS.map(|line| line.replace(' ', "\n")).to_vec(),
        }
    }
}

impl Surface for Words {
    fn name(&self) -> &'static str {
        "words"
    }

    fn share(&self) -> u64 {
        40
    }

    fn input(&mut self, rng: &mut SampleRng) -> Vec<u8> {
        mutate::text(rng, &self.commands, PIECES)
    }

    fn check(&mut self, input: &[u8]) -> Result<bool, String> {
        let text = String::from_utf8_lossy(input);
        let words: Vec<&str> = text.split('\n').collect();
        match understands(&words) {
            Err(said) => {
                promise(!said.trim().is_empty(), || "it says nothing".to_string())?;
                Ok(false)
            }
            Ok(read) => {
                let again = understands(&words);
                promise(again.as_ref() == Ok(&read), || format!("then {again:?}"))?;
                values(&words).try_for_each(|(option, value)| agrees(option, value, &read))?;
                Ok(true)
            }
        }
    }

    /// Allows more memory, because parsing builds all commands with their
    /// options and texts, whatever the input.
    fn memory(&self, length: usize) -> usize {
        (8 << 20) + 500 * length
    }

    fn work(&self, length: usize) -> usize {
        (64 << 20) + 4000 * length
    }
}

fn understands(words: &[&str]) -> Result<String, String> {
    let name = OsString::from("moesaic");
    let words = words.iter().map(OsString::from);
    let understood = moesaic_cli::understands(std::iter::once(name).chain(words));
    understood.map_err(|error| error.to_string())
}

/// Iterates over options and their values, for commands that pass no words to a
/// program.
fn values<'a>(words: &'a [&'a str]) -> impl Iterator<Item = (&'a str, &'a str)> {
    let own = !words.contains(&"--") && words.first() != Some(&"launch");
    let behind = words.windows(2).map(|pair| (pair[0], pair[1]));
    let joined = words.iter().filter_map(|word| word.split_once('='));
    let all = behind.chain(joined).filter(move |_| own);
    all.filter(|(option, _)| option.starts_with("--"))
}

/// Compares the parsed value with the text, read here in another way.
fn agrees(option: &str, value: &str, read: &str) -> Result<(), String> {
    match option {
        "--mesh" => agrees_as_mesh(value, read),
        "--target" => agrees_as_target(value, read),
        "--max-size" | "--l1" | "--l2" => agrees_as_size(value, read),
        _ if LISTS.contains(&option) => agrees_as_list(value, read),
        _ => Ok(()),
    }
}

fn agrees_as_list(value: &str, read: &str) -> Result<(), String> {
    let numbers: Result<Vec<u64>, _> = value.split(',').map(str::parse).collect();
    let numbers = numbers.map_err(|error| format!("`{value}` was taken: {error}"))?;
    let digits: Vec<String> = numbers.iter().map(u64::to_string).collect();
    promise(read.contains(&digits.join(", ")), || {
        format!("`{value}` was read as {read}")
    })
}

fn agrees_as_mesh(value: &str, read: &str) -> Result<(), String> {
    let mut names = Vec::new();
    for part in value.split(',') {
        let (name, number) = part
            .split_once('=')
            .ok_or_else(|| format!("`{part}` was taken"))?;
        let (name, number) = (name.trim(), number.trim());
        let number = match (name, number) {
            ("shared", "sharded") => "Sharded",
            ("shared", "whole") => "Whole",
            _ => number,
        };
        let number = number.strip_prefix('+').unwrap_or(number);
        let number = number.trim_start_matches('0');
        let number = if number.is_empty() { "0" } else { number };
        promise(!names.contains(&name), || format!("`{name}` twice"))?;
        promise(read.contains(&format!("{name}: {number}")), || {
            format!("`{value}` was read as {read}")
        })?;
        names.push(name);
    }
    Ok(())
}

fn agrees_as_target(value: &str, read: &str) -> Result<(), String> {
    for name in value.split(',').map(str::trim) {
        let short = ["auto", "cpu", "cuda", "rocm"].contains(&name);
        let known = short || read.contains(&format!("\"{name}\""));
        promise(known, || format!("`{name}` was read as {read}"))?;
    }
    Ok(())
}

/// Compares sizes: whole numbers of bytes print as they are; others fit into 64
/// bits.
fn agrees_as_size(value: &str, read: &str) -> Result<(), String> {
    let number = value.split(char::is_alphabetic).next().unwrap_or("").trim();
    let fits = number.parse::<f64>().is_ok_and(|n| n < u64::MAX as f64);
    promise(fits, || format!("`{value}` was taken"))?;
    match value.trim().parse::<u128>() {
        Ok(bytes) => promise(read.contains(&format!("Some({bytes})")), || {
            format!("`{value}` was read as {read}")
        }),
        Err(_) => Ok(()),
    }
}
