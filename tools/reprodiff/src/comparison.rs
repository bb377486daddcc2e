//! Both builds get every layer.

use crate::compare;
use crate::program::{Outcome, Pair};
use crate::specs::Case;
use crate::table::Table;
use crate::tensors;
use crate::{Arguments, Failed};
use moesaic_kernel::{SimArch, Target};
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

/// The kernels that `moesaic emit` is asked for.
const PLANS: [&[&str]; 4] = [
    &[],
    &["--training"],
    &["--training=hidden"],
    &["--training=all"],
];

/// What `moesaic run` is asked for: each layer gets the first two, and one of
/// the others in turn.
const PASSES: [&[&str]; 5] = [
    &["--record", "record.safetensors"],
    &["--training"],
    &["--grad"],
    &["--grad", "--recompute", "hidden"],
    &["--grad", "--recompute", "all"],
];

/// Both builds, and what is known of them.
pub struct Comparison<'a> {
    pair: Pair,
    arguments: &'a Arguments,
    work: &'a Path,
    /// What was compared.
    pub table: Table,
    /// What was different.
    pub differences: Vec<String>,
}

impl<'a> Comparison<'a> {
    /// Nothing is compared yet. Files go to `work`.
    pub fn new(arguments: &'a Arguments, work: &'a Path) -> Result<Comparison<'a>, Failed> {
        let limit = Duration::from_secs(arguments.limit);
        Ok(Comparison {
            pair: Pair::new(&arguments.before, &arguments.after, work, limit)?,
            arguments,
            work,
            table: Table::default(),
            differences: Vec::new(),
        })
    }

    /// Compares the kernels of every layer for every target.
    pub fn texts(&mut self, cases: &[Case]) -> Result<(), Failed> {
        let started = Instant::now();
        let targets: Vec<String> = Target::all().iter().map(Target::to_string).collect();
        let targets = targets.join(",");
        for (i, case) in cases.iter().enumerate() {
            if self.is_over(started) {
                self.table.left("text", cases.len() - i);
                break;
            }
            let spec = self.write_spec(case)?;
            for plan in PLANS {
                let words = ["emit", "--spec", &spec, "--target", &targets, "-o", "text"];
                let kind = format!("text {}", plan.first().unwrap_or(&"forward"));
                self.compare(&kind, case, &[&words, plan].concat(), &|pair| {
                    let [before, after] = pair.both("text");
                    compare::folders(&before, &after)
                })?;
            }
        }
        Ok(())
    }

    /// Compares the results of every small layer on each CPU and on some
    /// simulated GPUs.
    pub fn results(&mut self, cases: &[Case]) -> Result<(), Failed> {
        let started = Instant::now();
        let small = |case: &&Case| tensors::weight_bytes(&case.spec) <= self.arguments.largest;
        let cases: Vec<&Case> = cases.iter().filter(small).collect();
        for (i, case) in cases.iter().enumerate().skip(self.arguments.skip) {
            if self.is_over(started) {
                self.table.left("results", cases.len() - i);
                break;
            }
            self.result(case, i)?;
        }
        Ok(())
    }

    fn result(&mut self, case: &Case, index: usize) -> Result<(), Failed> {
        let spec = self.write_spec(case)?;
        let [weights, input] = ["weights", "input"].map(|name| self.work.join(name));
        let tokens = [1, 7, 33, 100][index % 4];
        tensors::write_weights(&case.spec, index as u64, &weights)?;
        tensors::write_input(&case.spec, tokens, index as u64, &input)?;
        let files = [weights, input].map(|path| path.display().to_string());
        let [weights, input] = &files;
        for target in self.targets(index) {
            let from = ["--spec", &spec, "--weights", weights, "--input", input];
            let to = ["--output", "y.safetensors", "--target", &target];
            for pass in [PASSES[0], PASSES[1], PASSES[2 + index % 3]] {
                let kind = match pass[0] {
                    "--record" => format!("{target} forward"),
                    other => format!("{target} {}", other.trim_start_matches("--")),
                };
                let words = [&["run"][..], &from, &to, pass].concat();
                self.compare(&kind, case, &words, &|pair| results(pair, pass))?;
            }
        }
        Ok(())
    }

    /// CPUs, real or emulated, and simulated GPUs of both vendors, in turn.
    fn targets(&self, index: usize) -> Vec<String> {
        let Arguments {
            target, cpus, each, ..
        } = self.arguments;
        if !target.is_empty() {
            return target.iter().map(Target::to_string).collect();
        }
        let kind = |of: fn(&Target) -> bool| Target::all().into_iter().filter(of).collect();
        let all: Vec<Target> = kind(|t| matches!(t, Target::Cpu(_) | Target::Sim(SimArch::Cpu(_))));
        let cuda: Vec<Target> = kind(|t| matches!(t, Target::Sim(SimArch::Cuda(_))));
        let rocm: Vec<Target> = kind(|t| matches!(t, Target::Sim(SimArch::Rocm(_))));
        let cpus = cpus.unwrap_or(all.len()).min(all.len());
        let cpus = (index * cpus..(index + 1) * cpus).map(|i| all[i % all.len()]);
        let gpus = (index * each..(index + 1) * each).map(|i| match i % 2 {
            0 => cuda[i / 2 % cuda.len()],
            _ => rocm[i / 2 % rocm.len()],
        });
        cpus.chain(gpus).map(|target| target.to_string()).collect()
    }

    /// Runs a command of both builds and compares what it wrote.
    fn compare(
        &mut self,
        kind: &str,
        case: &Case,
        words: &[&str],
        written: &dyn Fn(&Pair) -> Result<usize, String>,
    ) -> Result<(), Failed> {
        if self.differences.len() >= self.arguments.differences {
            return Ok(());
        }
        let started = Instant::now();
        let outcome = self.pair.run(words)?;
        let row = self.table.row(kind);
        let different = match outcome {
            Outcome::Done => match written(&self.pair) {
                Ok(parts) => {
                    row.same += 1;
                    row.parts += parts;
                    None
                }
                Err(difference) => Some(difference),
            },
            Outcome::Refused => {
                row.refused += 1;
                None
            }
            Outcome::Stopped => {
                row.stopped += 1;
                None
            }
            Outcome::Different([before, after]) => {
                Some(format!("exit code was {before:?}, is {after:?}"))
            }
        };
        row.time += started.elapsed();
        if let Some(difference) = different {
            row.different += 1;
            self.differences.push(format!(
                "{kind} of {}: {difference}\n{}",
                case.name,
                case.spec.to_toml()
            ));
        }
        Ok(())
    }

    fn write_spec(&self, case: &Case) -> Result<String, Failed> {
        let path = self.work.join("spec.toml");
        fs::write(&path, case.spec.to_toml()).map_err(|e| Failed::File(path.clone(), e))?;
        Ok(path.display().to_string())
    }

    /// Returns whether half of the time has gone, or enough is known.
    fn is_over(&self, started: Instant) -> bool {
        let half = self.arguments.seconds.map(|s| Duration::from_secs(s) / 2);
        let late = half.is_some_and(|half| started.elapsed() > half);
        late || self.differences.len() >= self.arguments.differences
    }
}

/// Compares the files that a pass wrote.
fn results(pair: &Pair, pass: &[&str]) -> Result<usize, String> {
    let [before, after] = pair.both("y.safetensors");
    let named = |difference| format!("`run {}`: {difference}", pass.join(" "));
    let found = compare::tensors(&before, &after).map_err(named)?;
    let Some(record) = pass.iter().find(|word| word.ends_with(".safetensors")) else {
        return Ok(found);
    };
    let [before, after] = pair.both(record);
    Ok(found + compare::tensors(&before, &after)?)
}
