//! A table of the compilers' reports, by target and family.

use moesaic_kernel::{KernelSource, Target};
use moesaic_target::ArtifactReport;
use std::collections::BTreeMap;
use std::fmt;

/// For each target and family: the number of kernels, and the entry with the
/// most registers.
#[derive(Clone, Debug, Default)]
pub struct Table {
    /// Number of layers that were begun.
    pub layers: u64,
    /// Number of kernels that did not compile as they should.
    pub failures: u64,
    rows: BTreeMap<(Target, String), Row>,
}

#[derive(Clone, Debug, Default)]
struct Row {
    kernels: u64,
    registers: u32,
    threads: u32,
    entry: String,
}

impl Table {
    /// Returns the number of kernels that compiled.
    pub fn kernels(&self) -> u64 {
        self.rows.values().map(|row| row.kernels).sum()
    }

    pub(crate) fn add(
        &mut self,
        target: Target,
        family: &str,
        source: &KernelSource,
        report: &ArtifactReport,
    ) {
        let row = self.rows.entry((target, family.to_string())).or_default();
        row.kernels += 1;
        for kernel in &report.kernels {
            let entry = source.entries.iter().find(|e| e.symbol == kernel.symbol);
            let registers = kernel.registers.unwrap_or(0);
            if registers > row.registers {
                row.registers = registers;
                row.entry.clone_from(&kernel.symbol);
                row.threads = entry.map_or(0, |entry| entry.launch.threads);
            }
        }
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (layers, kernels, failures) = (self.layers, self.kernels(), self.failures);
        writeln!(
            f,
            "{layers} layers, {kernels} different kernels, {failures} failures\n"
        )?;
        writeln!(
            f,
            "{:<14} {:<26} {:>8} {:>14} {:>8}  of entry",
            "target", "kernels of", "number", "most registers", "threads"
        )?;
        for ((target, family), row) in &self.rows {
            let target = target.to_string();
            let Row {
                kernels,
                registers,
                threads,
                entry,
            } = row;
            writeln!(
                f,
                "{target:<14} {family:<26} {kernels:>8} {registers:>14} {threads:>8}  {entry}"
            )?;
        }
        Ok(())
    }
}
