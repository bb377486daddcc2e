//! `fuzz [--inputs N] [--seed S] [--surface NAME [--first N]] [--file F]…`
//!
//! The program runs itself as a child that does the work, so that a crash of
//! the child, such as a stack overflow, is a failure with a number like any
//! other.

mod child;
mod parent;

use std::path::PathBuf;
use std::process::ExitCode;

const USAGE: &str = "\
usage: cargo xtask fuzz [options]

  --inputs N       how many inputs, 10000 if not given
  --seed S         which inputs, 1 if not given
  --surface NAME   inputs of one kind only
  --first N        the number of the first input of that kind
  --file F         a kept input, named KIND/NAME; may be given again
  --out DIR        where inputs that fail are written, target/fuzz";

/// The settings of a run.
#[derive(Clone, Debug)]
pub struct Options {
    inputs: u64,
    seed: u64,
    surface: Option<String>,
    first: u64,
    files: Vec<PathBuf>,
    out: PathBuf,
    /// The file to which a child writes the number of its input; absent in a
    /// parent.
    at: Option<PathBuf>,
}

fn options() -> Result<Options, String> {
    let mut options = Options {
        inputs: 10_000,
        seed: 1,
        surface: None,
        first: 0,
        files: Vec::new(),
        out: PathBuf::from("target/fuzz"),
        at: None,
    };
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let value = words
            .next()
            .ok_or_else(|| format!("{word} has no value\n{USAGE}"))?;
        let number = || {
            value
                .parse()
                .map_err(|_| format!("{word} {value} is not a number"))
        };
        match word.as_str() {
            "--inputs" => options.inputs = number()?,
            "--seed" => options.seed = number()?,
            "--first" => options.first = number()?,
            "--surface" => options.surface = Some(known(value)?),
            "--file" => options.files.push(value.into()),
            "--out" => options.out = value.into(),
            "--at" => options.at = Some(value.into()),
            _ => return Err(USAGE.to_string()),
        }
    }
    Ok(options)
}

fn known(name: String) -> Result<String, String> {
    let names: Vec<&str> = moesaic_fuzz::surfaces().iter().map(|s| s.name()).collect();
    if names.contains(&&*name) {
        Ok(name)
    } else {
        Err(format!(
            "no surface is called {name}; there are {}",
            names.join(", ")
        ))
    }
}

fn main() -> ExitCode {
    let done = options().and_then(|options| match options.at {
        Some(_) => child::run(&options),
        None => parent::run(&options),
    });
    match done {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(message) => {
            eprintln!("{message}");
            ExitCode::from(2)
        }
    }
}
