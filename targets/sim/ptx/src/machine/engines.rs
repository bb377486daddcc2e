//! The progress of copies and products: late, as the seed says.

use super::ClusterRunner;
use super::warp::{Group, Wait, Warp};
use crate::finding::{Fault, FaultPlace, FindingKind, Step};

impl ClusterRunner<'_> {
    /// Lets copies and products go on a step. With `force`, one must complete,
    /// since no thread can go on; returns true when one did.
    pub fn engines(&mut self, force: bool) -> Step<bool> {
        if self.bulk.is_idle() && !self.kernel.has_products {
            return Ok(false);
        }
        let products = self.run_products(force)?;
        Ok(products | self.run_bulk(force && !products)?)
    }

    /// Returns true if the copies or products that a group waits for are
    /// complete.
    pub fn engine_done(&self, number: usize, group: &Group) -> bool {
        match group.wait {
            Wait::Products(left) => self.products_done(number, left),
            Wait::Bulk { left, read } => self.bulk_done(number as u32, group.lanes, left, read),
            _ => true,
        }
    }

    /// Checks that threads which end have nothing in flight.
    pub fn end_engines(&mut self, warp: &mut Warp, mask: u32) -> Step<()> {
        if !warp.flying.is_empty() {
            let text = "ends with wgmma products it has not waited for";
            return Err(Fault::new(FindingKind::PendingAtExit, mask, text));
        }
        self.end_bulk(warp, mask)
    }

    /// Checks, once every thread has ended, that no copy still writes to the
    /// blocks.
    pub fn finish(&mut self) -> Result<(), (usize, Box<Fault>)> {
        let Some(job) = self.bulk.first() else {
            return Ok(());
        };
        let text = "every thread of the block has ended, and a bulk copy is in flight";
        let mut fault = Fault::new(FindingKind::PendingAtExit, 0, text);
        fault.at = Some(FaultPlace {
            pc: job.pc,
            block: self.warps[job.thread as usize / 32].block,
            threads: vec![self.thread_in_block(job.thread)],
        });
        Err((job.thread as usize / 32, fault))
    }

    /// Returns the number in its block of a thread of the cluster.
    pub fn thread_in_block(&self, thread: u32) -> u32 {
        let warp = &self.warps[thread as usize / 32];
        warp.first_thread + thread % 32
    }
}
