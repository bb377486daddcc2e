//! The probes, one module per part of the hardware.

mod cluster;
mod convert;
mod copy;
mod matrix;
mod mbarrier;
mod mma;
mod roles;
mod tile;
mod tma;
mod warp;
mod wgmma;

use crate::bench::{Bench, Trouble};
use crate::random::Random;
use crate::report::Row;
use moesaic_hardware::float::{bf16_from_f32, f16_from_f32};
use moesaic_hardware::mma::MmaElement;

/// A probe of one part of the hardware.
pub struct Probe {
    /// Name, for rows of probes that did not run.
    pub name: &'static str,
    /// Least compute capability, times ten, that has it.
    pub capability: u16,
    /// Function that runs it.
    pub run: fn(&Bench, &mut Random) -> Result<Vec<Row>, Trouble>,
}

impl Probe {
    const fn new(
        name: &'static str,
        capability: u16,
        run: fn(&Bench, &mut Random) -> Result<Vec<Row>, Trouble>,
    ) -> Probe {
        Probe {
            name,
            capability,
            run,
        }
    }
}

/// Returns every probe.
pub fn all() -> impl Iterator<Item = &'static Probe> {
    let groups = [
        convert::PROBES,
        warp::PROBES,
        mma::PROBES,
        matrix::PROBES,
        copy::PROBES,
        mbarrier::PROBES,
        roles::PROBES,
        tma::PROBES,
        cluster::PROBES,
        wgmma::PROBES,
        tile::PROBES,
    ];
    groups.into_iter().flatten()
}

/// Returns a register of elements that are whole numbers from -8 to 8, or all
/// of a byte's values.
fn small(element: MmaElement, random: &mut Random) -> u32 {
    let mut value = || random.range(-8, 8) as f32;
    match element {
        MmaElement::F16 => {
            u32::from(f16_from_f32(value())) | u32::from(f16_from_f32(value())) << 16
        }
        MmaElement::Bf16 => {
            u32::from(bf16_from_f32(value())) | u32::from(bf16_from_f32(value())) << 16
        }
        MmaElement::Tf32 => value().to_bits(),
        MmaElement::S8 | MmaElement::U8 => random.bits(),
    }
}

/// Returns words as registers of a warp.
fn lanes(words: &[u32]) -> Vec<[u32; 32]> {
    let registers = words.chunks_exact(32);
    registers
        .map(|register| std::array::from_fn(|lane| register[lane]))
        .collect()
}
