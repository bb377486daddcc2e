//! Cache sizes of a CPU other than this one.

use crate::failure::{Failure, Result};
use crate::units;
use clap::Args;
use moesaic::Target;
use moesaic::cpu::host_caches;
use moesaic::kernel::CpuCaches;
use moesaic::plan::CacheClass;

/// The options `--l1 SIZE` and `--l2 SIZE`.
#[derive(Args, Clone, Copy, Debug)]
pub struct CacheSizeArgs {
    /// First-level data cache of a core of the CPU that runs the kernels, such as 32KiB
    #[arg(long, value_name = "SIZE", value_parser = units::parse_bytes)]
    l1: Option<u64>,
    /// Second-level cache of a core of the CPU that runs the kernels, such as 512KiB
    #[arg(long, value_name = "SIZE", value_parser = units::parse_bytes)]
    l2: Option<u64>,
}

impl CacheSizeArgs {
    /// Refuses cache sizes when none of the targets is a CPU. Only CPU kernels depend on them.
    pub fn check(self, targets: &[Target]) -> Result {
        let is_cpu = |target: &Target| matches!(target.hardware(), Target::Cpu(_));
        let Some(option) = self.option().filter(|_| !targets.iter().any(is_cpu)) else {
            return Ok(());
        };
        let names: Vec<String> = targets.iter().map(Target::to_string).collect();
        let names = names.join("`, `");
        let message = format!("{option} does nothing for `{names}`: it is the cache of a CPU");
        Err(Failure::input(message).hint("leave it out, or name a target such as cpu:avx512"))
    }

    /// Returns the name of the option that was given.
    pub fn option(self) -> Option<&'static str> {
        let l1 = self.l1.map(|_| "--l1");
        l1.or(self.l2.map(|_| "--l2"))
    }

    /// Returns the class of the given sizes, with assumed values for the sizes that were left out.
    pub fn assumed(self) -> CacheClass {
        CacheClass::of(self.given())
    }

    /// Returns the class of the given sizes; on a CPU target this machine's own sizes replace those
    /// that were left out.
    pub fn here(self, target: Target) -> CacheClass {
        CacheClass::of(match target {
            Target::Cpu(_) => self.given().or(host_caches()),
            _ => self.given(),
        })
    }

    fn given(self) -> CpuCaches {
        CpuCaches {
            l1_bytes: self.l1,
            l2_bytes: self.l2,
        }
    }
}
