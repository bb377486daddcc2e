//! `atom` and `red`.

use super::ClusterRunner;
use super::access::{SpacePart, addresses, little};
use super::lanes::atomic::combine;
use super::state::global::GlobalAccess;
use super::warp::{Doubles, Warp, lanes_of};
use crate::code::op::{Atomic, MemoryOrder, NONE};
use crate::finding::{Fault, FindingKind, Step};
use crate::memory::Touch;
use crate::text::StateSpace;

impl ClusterRunner<'_> {
    pub fn atomic(&mut self, warp: &mut Warp, atomic: &Atomic, mask: u32) -> Step<()> {
        self.changes += 1;
        let addresses = addresses(warp, &atomic.address);
        let mut old = vec![[0; 32]; atomic.operands.len()];
        for part in self.resolve(atomic.space, &addresses, mask) {
            let SpacePart {
                space,
                addresses,
                mask,
            } = part;
            let bytes = u64::from(atomic.bytes) * old.len() as u64;
            // An atomic with release semantics publishes before its update, and
            // one with acquire learns after it; `acq_rel` does both, in this
            // order.
            self.order_before(warp, atomic.order, space, &addresses, mask);
            match space {
                StateSpace::Shared => {
                    self.tally.shared(&addresses, mask, bytes);
                    self.atomic_shared(warp, atomic, &addresses, mask, &mut old)?;
                }
                StateSpace::Global => {
                    self.tally.global(true, &addresses, mask, bytes);
                    self.atomic_global(warp, atomic, &addresses, mask, &mut old)?;
                }
                _ => {
                    let text = format!("an atomic on {} memory", space.name());
                    return Err(Fault::new(FindingKind::OutOfBounds, mask, text));
                }
            }
            self.order_after(warp, atomic.order, space, &addresses, mask);
        }
        for (row, value) in atomic.results.iter().zip(&old) {
            if atomic.wide {
                warp.put_double(*row, value, mask)
            } else {
                warp.put(*row, &value.map(|v| v as u32), mask)
            }
        }
        Ok(())
    }

    fn atomic_operand(&self, warp: &Warp, atomic: &Atomic, row: u16, lane: usize) -> u64 {
        match (row, atomic.wide) {
            (NONE, _) => 0,
            (row, true) => warp.double(row)[lane],
            (row, false) => u64::from(warp.word(row)[lane]),
        }
    }

    fn atomic_shared(
        &mut self,
        warp: &Warp,
        atomic: &Atomic,
        addresses: &Doubles,
        mask: u32,
        old: &mut [Doubles],
    ) -> Step<()> {
        let bytes = atomic.bytes as usize;
        for lane in lanes_of(mask) {
            let whole = bytes * old.len();
            let (block, first) =
                self.shared_at("updates", warp.block, addresses[lane], whole, lane)?;
            // An atomic reads and writes, and conflicts with plain accesses of
            // either kind. Relaxed order keeps it from racing with other
            // atomics.
            self.shared_read(warp, block, first, whole, 1 << lane, MemoryOrder::Relaxed)?;
            self.shared_mark(warp, block, first, whole, lane)?;
            for (at, old) in old.iter_mut().enumerate() {
                let operand = self.atomic_operand(warp, atomic, atomic.operands[at], lane);
                let swap = self.atomic_operand(warp, atomic, atomic.swap, lane);
                let offset = first + at * bytes;
                let cell = &mut self.blocks[block].shared[offset..offset + bytes];
                old[lane] = little(cell);
                let new = combine(atomic.kind, atomic.ty, old[lane], operand, swap);
                cell.copy_from_slice(&new.to_le_bytes()[..bytes]);
            }
        }
        Ok(())
    }

    fn atomic_global(
        &mut self,
        warp: &Warp,
        atomic: &Atomic,
        addresses: &Doubles,
        mask: u32,
        old: &mut [Doubles],
    ) -> Step<()> {
        let bytes = atomic.bytes as usize;
        for lane in lanes_of(mask) {
            let whole = bytes * old.len();
            let (region, first) = self.global("updates", addresses[lane], whole, lane as u32)?;
            let allocation = &self.launch.regions.list[region];
            // An atomic reads the bytes that it updates, so unwritten ones are
            // refused although it writes them: a counter that nobody cleared.
            if !allocation.valid.all(first, whole)
                && !self.log.wrote(region, first, &allocation.valid, whole)
            {
                return Err(self.unwritten_atomic(region, first, lane));
            }
            self.log.touch(Touch::Atomic, region, first, whole, self.pc);
            let access = GlobalAccess {
                region,
                offset: first,
                bytes: whole,
                lane,
                atomic: true,
            };
            self.global_write(warp, access, false)?;
            let allocation = &self.launch.regions.list[region];
            for (at, old) in old.iter_mut().enumerate() {
                let operand = self.atomic_operand(warp, atomic, atomic.operands[at], lane);
                let swap = self.atomic_operand(warp, atomic, atomic.swap, lane);
                let f = |value| combine(atomic.kind, atomic.ty, value, operand, swap);
                old[lane] = allocation.update(first + at * bytes, bytes, f);
            }
        }
        Ok(())
    }

    #[cold]
    fn unwritten_atomic(&self, region: usize, offset: usize, lane: usize) -> Box<Fault> {
        let bytes = self.launch.regions.list[region].bytes;
        let text = format!(
            "updates global memory that nothing has written, \
             at byte {offset} of an allocation of {bytes} bytes"
        );
        Fault::new(FindingKind::UninitialisedGlobal, 1 << lane, text)
    }
}
