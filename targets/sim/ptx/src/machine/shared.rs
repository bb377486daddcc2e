//! Shared memory of the blocks of a cluster.

use super::ClusterRunner;
use super::access::{little, misaligned, outside};
use super::warp::{Doubles, Flow, Wait, Warp, lanes_of};
use crate::code::layout::{RANK_SHIFT, SHARED_START};
use crate::code::op::MemoryAccess;
use crate::finding::{Fault, FindingKind, Step};
use crate::text::StateSpace;
use std::rc::Rc;

impl ClusterRunner<'_> {
    /// Returns the block and the offset of a shared address.
    #[inline(always)]
    pub fn shared_at(
        &self,
        verb: &str,
        own: u32,
        address: u64,
        bytes: usize,
        lane: usize,
    ) -> Step<(usize, usize)> {
        let rank = (address >> RANK_SHIFT) as u32;
        let offset = (address & ((1 << RANK_SHIFT) - 1)) as usize;
        // Rank 0 stands for the own block: plain shared addresses have no rank,
        // and `mapa` adds the rank plus one above the offset.
        let block = if rank == 0 { own } else { rank - 1 } as usize;
        let end = self.blocks.get(block).map_or(0, |block| block.shared.len());
        // Address 0 and the first kilobyte belong to nobody, so that a null
        // pointer or a forgotten base is out of bounds instead of a hit in the
        // first buffer.
        if offset < SHARED_START as usize || offset + bytes > end || address >> 32 != 0 {
            return Err(self.not_shared(verb, block, address, bytes, lane));
        }
        if !offset.is_multiple_of(bytes) {
            return Err(misaligned(
                1 << lane,
                verb,
                bytes,
                StateSpace::Shared,
                address,
            ));
        }
        Ok((block, offset))
    }

    #[cold]
    fn not_shared(
        &self,
        verb: &str,
        block: usize,
        address: u64,
        bytes: usize,
        lane: usize,
    ) -> Box<Fault> {
        let count = self.blocks.len();
        let place = match self.blocks.get(block) {
            None => format!("the cluster has {count} blocks"),
            Some(block) => format!(
                "the block has {} bytes at {SHARED_START:#x}",
                block.shared.len() - SHARED_START as usize
            ),
        };
        outside(1 << lane, verb, bytes, StateSpace::Shared, address, &place)
    }

    pub fn load_shared(
        &mut self,
        warp: &mut Warp,
        access: &MemoryAccess,
        addresses: &Doubles,
        mask: u32,
    ) -> Step<()> {
        let (element, count) = (access.bytes as usize, access.rows.len());
        let bytes = element * count;
        self.tally.shared(addresses, mask, bytes as u64);
        let mut values = [[0; 32]; 8];
        let mut noted = 0;
        for lane in lanes_of(mask) {
            let (block, offset) =
                self.shared_at("reads", warp.block, addresses[lane], bytes, lane)?;
            // Lanes that read the same address with the same knowledge are
            // recorded together: broadcasts of a table are frequent, and 32
            // equal checks are not cheap.
            if noted >> lane & 1 == 0 {
                let same = same_bytes(warp, addresses, mask, lane);
                noted |= same;
                self.shared_read(warp, block, offset, bytes, same, access.order)?;
            }
            let from = &self.blocks[block].shared[offset..offset + bytes];
            for (value, part) in values.iter_mut().zip(from.chunks_exact(element)) {
                value[lane] = match element {
                    4 => u64::from(u32::from_le_bytes([part[0], part[1], part[2], part[3]])),
                    _ => little(part),
                };
            }
        }
        self.order_after(warp, access.order, StateSpace::Shared, addresses, mask);
        self.deliver(warp, access, &values[..count], mask);
        Ok(())
    }

    pub fn store_shared(
        &mut self,
        warp: &mut Warp,
        access: &MemoryAccess,
        addresses: &Doubles,
        mask: u32,
    ) -> Step<()> {
        let (element, count) = (access.bytes as usize, access.rows.len());
        let bytes = element * count;
        self.tally.shared(addresses, mask, bytes as u64);
        // The release comes before the write is checked and recorded: a flag's
        // own write is part of what its reader acquires.
        self.order_before(warp, access.order, StateSpace::Shared, addresses, mask);
        for lane in lanes_of(mask) {
            let (block, offset) =
                self.shared_at("writes", warp.block, addresses[lane], bytes, lane)?;
            let value = |at: usize| self.stored(warp, access, at, lane).to_le_bytes();
            let mut new = [0; 32];
            for at in 0..count {
                new[at * element..][..element].copy_from_slice(&value(at)[..element]);
            }
            self.shared_write(warp, block, offset, &new[..bytes], lane, access.order)?;
            self.blocks[block].shared[offset..offset + bytes].copy_from_slice(&new[..bytes]);
        }
        Ok(())
    }

    pub fn set_registers(
        &mut self,
        warp: &mut Warp,
        grow: bool,
        count: u32,
        mask: u32,
    ) -> Step<Flow> {
        if let Some(flow) = self.whole_warp(warp, mask) {
            return Ok(flow);
        }
        // PTX ISA, "setmaxnreg": the range 24 to 256 in steps of 8.
        if !(24..=256).contains(&count) || !count.is_multiple_of(8) {
            let text = format!("setmaxnreg to {count}: it must be a multiple of 8 from 24 to 256");
            return Err(Fault::new(FindingKind::Operand, mask, text));
        }
        let Some(most) = self.kernel.max_threads else {
            let text = "setmaxnreg in a kernel without .maxntid, which ptxas ignores";
            return Err(Fault::new(FindingKind::Operand, mask, text));
        };
        let now = match warp.max_registers {
            0 => registers_at_start(most),
            count => count,
        };
        let block = &mut self.blocks[warp.block as usize];
        if grow && count > now {
            // It waits until other warps have given back as many.
            if !block.has_registers(count - now) {
                return Ok(Flow::Again(Wait::Registers(count - now)));
            }
            block.spare_registers -= count - now;
        } else if !grow {
            block.spare_registers += now.saturating_sub(count);
        }
        self.changes += 1;
        warp.max_registers = count;
        Ok(Flow::Next)
    }
}

/// Returns the registers of a thread at its start: as many as blocks of `most` threads leave it, in
/// steps of 8. ptxas gives no fewer to kernels of three warpgroups with setmaxnreg.
fn registers_at_start(most: u32) -> u32 {
    const OF_MULTIPROCESSOR: u32 = 65536;
    (OF_MULTIPROCESSOR / most.max(1) / 8 * 8).min(256)
}

/// Returns the lanes from `lane` on that read the same bytes with the same
/// knowledge.
#[inline(always)]
fn same_bytes(warp: &Warp, addresses: &Doubles, mask: u32, lane: usize) -> u32 {
    let mut same = 1 << lane;
    let known = &warp.known[lane].seen;
    for other in lane + 1..32 {
        let equal = mask >> other & 1 == 1
            && addresses[other] == addresses[lane]
            && Rc::ptr_eq(&warp.known[other].seen, known);
        same |= u32::from(equal) << other;
    }
    same
}
