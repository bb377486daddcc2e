//! `cp.async`: copies of up to 16 bytes per thread that complete in the
//! background.
//!
//! The bytes move as late as the program allows, or at commit if the seed says
//! so. Until a thread has waited for its copies, no thread may touch their
//! destination.

use super::ClusterRunner;
use super::access::addresses;
use super::state::copies::AsyncCopy;
use super::warp::{Flow, Warp, lanes_of};
use crate::code::op::{AsyncOp, CopyAsync};
use crate::finding::{Fault, FindingKind, Step};
use crate::text::StateSpace;

impl ClusterRunner<'_> {
    pub fn asynchronous(&mut self, warp: &mut Warp, op: &AsyncOp, mask: u32) -> Step<Flow> {
        match op {
            AsyncOp::Copy(copy) => self.copy_issue(warp, copy, mask),
            AsyncOp::CopyCommit => {
                self.copy_commit(warp, mask)?;
                Ok(Flow::Next)
            }
            AsyncOp::CopyWait(left) => {
                self.copy_wait(warp, *left, mask)?;
                Ok(Flow::Next)
            }
            AsyncOp::Bulk(bulk) => self.bulk(warp, bulk, mask),
            AsyncOp::Tensor(copy) => self.tensor_copy(warp, copy, mask),
            AsyncOp::BulkCommit => {
                self.bulk_commit(warp, mask);
                Ok(Flow::Next)
            }
            AsyncOp::BulkWait { left, read } => self.bulk_wait(warp, *left, *read, mask),
            AsyncOp::Wgmma(wgmma) => self.wgmma(warp, wgmma, mask),
            AsyncOp::WgmmaFence => self.wgmma_fence(warp, mask),
            AsyncOp::WgmmaCommit => self.wgmma_commit(warp, mask),
            AsyncOp::WgmmaWait(left) => self.wgmma_wait(warp, *left, mask),
        }
    }

    fn copy_issue(&mut self, warp: &mut Warp, copy: &CopyAsync, mask: u32) -> Step<Flow> {
        let bytes = copy.bytes as usize;
        let (to, from) = (addresses(warp, &copy.to), addresses(warp, &copy.from));
        let mut source_bytes = *warp.word(copy.source_bytes);
        if let Some((row, negate)) = copy.ignore {
            for lane in lanes_of(warp.predicate(row, negate)) {
                source_bytes[lane] = 0;
            }
        }
        self.tally.shared(&to, mask, bytes as u64);
        // `src-size` 0 reads nothing, so kernels point such lanes anywhere,
        // past the end of a tensor as well (PTX ISA, "cp.async"). Neither
        // bounds nor sectors may count them.
        let reads = lanes_of(mask).fold(0, |m, lane| m | u32::from(source_bytes[lane] > 0) << lane);
        if reads != 0 {
            self.tally.global(false, &from, reads, bytes as u64);
        }
        for lane in lanes_of(mask) {
            let count = source_bytes[lane] as usize;
            if count > bytes {
                let text = format!("cp.async of {bytes} bytes with a source of {count}");
                return Err(Fault::new(FindingKind::Operand, 1 << lane, text));
            }
            // All checks are made when the copy is issued, with the knowledge
            // of the issuing thread. Later the thread may have learnt more,
            // which would hide a race with the moment the copy really starts.
            let (block, offset) = self.shared_at("copies to", warp.block, to[lane], bytes, lane)?;
            self.copy_starts(warp, block, offset, bytes, lane)?;
            if !from[lane].is_multiple_of(bytes as u64) && count > 0 {
                let verb = "copies";
                let fault = super::access::misaligned;
                return Err(fault(
                    1 << lane,
                    verb,
                    bytes,
                    StateSpace::Global,
                    from[lane],
                ));
            }
            if count > 0 {
                let (region, at) = self.global_bytes("copies", from[lane], count, lane as u32)?;
                self.note_read(false, region, at, count, 1 << lane)?;
            }
        }
        self.copies[warp.number as usize].jobs.push(AsyncCopy {
            lanes: mask,
            group: None,
            to,
            from,
            bytes,
            source_bytes,
            moved: false,
            pc: self.pc,
        });
        Ok(Flow::Next)
    }

    /// Returns the region and offset of bytes that need no alignment of their
    /// own.
    pub fn global_bytes(
        &mut self,
        verb: &str,
        address: u64,
        bytes: usize,
        lane: u32,
    ) -> Step<(usize, usize)> {
        self.after_launches(verb, lane)?;
        match self.launch.regions.find(address, bytes, self.hint) {
            Some(region) => {
                self.hint = region;
                let start = self.launch.regions.list[region].base;
                Ok((region, (address - start) as usize))
            }
            None => Err(super::access::outside(
                1 << lane,
                verb,
                bytes,
                StateSpace::Global,
                address,
                &self.launch.regions.describe(address),
            )),
        }
    }

    fn copy_commit(&mut self, warp: &Warp, mask: u32) -> Step<()> {
        // Both extremes of "asynchronous" have to give the same result: bytes
        // that arrive at the commit and bytes that arrive at the wait. The
        // first finds buffers that are still being read, the second finds
        // missing waits.
        let early = self.launch.seed != 0 && self.random.below(3) == 0;
        let own = &mut self.copies[warp.number as usize];
        let mut at = 0;
        let mut moves = Vec::new();
        while at < own.jobs.len() {
            let job = &own.jobs[at];
            let lanes = job.lanes & mask;
            if job.group.is_some() || lanes == 0 {
                at += 1;
                continue;
            }
            // Lanes with equal group numbers stay one job.
            let number = own.committed[lanes.trailing_zeros() as usize];
            let same = lanes_of(lanes).filter(|lane| own.committed[*lane] == number);
            let same = same.fold(0, |lanes, lane| lanes | 1 << lane);
            // Lanes may have committed different numbers of groups after
            // divergence. The rest becomes a job of its own, since a group
            // number belongs to a thread and not to a warp (PTX ISA,
            // "cp.async.commit_group": per thread).
            if same != job.lanes {
                let rest = AsyncCopy {
                    lanes: job.lanes & !same,
                    group: None,
                    moved: false,
                    ..*job
                };
                own.jobs.push(rest);
            }
            own.jobs[at].lanes = same;
            own.jobs[at].group = Some(number);
            moves.push(at);
            at += 1;
        }
        for lane in lanes_of(mask) {
            own.committed[lane] += 1;
        }
        // The rest of the bytes beyond `src-size` is zero, as the ISA says,
        // hence the cleared buffer.
        if early {
            moves.into_iter().for_each(|at| self.copy_move(warp, at));
        }
        Ok(())
    }

    /// Moves the bytes of job `at`. Everything was checked when it was issued.
    fn copy_move(&mut self, warp: &Warp, at: usize) {
        let job = &mut self.copies[warp.number as usize].jobs[at];
        if std::mem::replace(&mut job.moved, true) {
            return;
        }
        let (lanes, to, from) = (job.lanes, job.to, job.from);
        let (bytes, source_bytes) = (job.bytes, job.source_bytes);
        for lane in lanes_of(lanes) {
            let count = source_bytes[lane] as usize;
            let mut data = [0; 16];
            if let Some(region) = self.launch.regions.find(from[lane], count, self.hint)
                && count > 0
            {
                let region = &self.launch.regions.list[region];
                region.copy_out((from[lane] - region.base) as usize, &mut data[..count]);
            }
            if let Ok((block, offset)) = self.shared_at("", warp.block, to[lane], bytes, lane) {
                self.blocks[block].shared[offset..offset + bytes].copy_from_slice(&data[..bytes]);
            }
        }
    }

    /// Completes the groups of the lanes of a mask except the last `left`.
    fn copy_wait(&mut self, warp: &mut Warp, left: Option<u32>, mask: u32) -> Step<()> {
        let number = warp.number as usize;
        let mut at = 0;
        while at < self.copies[number].jobs.len() {
            // `wait_all` also covers copies that were never committed,
            // `wait_group N` does not (PTX ISA, "cp.async.wait_group").
            let own = &self.copies[number];
            let job = &own.jobs[at];
            let done = lanes_of(job.lanes & mask).filter(|lane| match (job.group, left) {
                (_, None) => true,
                (None, Some(_)) => false,
                (Some(group), Some(left)) => group + left < own.committed[*lane],
            });
            let done = done.fold(0, |lanes, lane| lanes | 1 << lane);
            at += usize::from(!self.copy_finish(warp, at, done));
        }
        Ok(())
    }

    /// Completes the copies of some lanes of a job; returns true when the job
    /// is gone.
    fn copy_finish(&mut self, warp: &Warp, at: usize, lanes: u32) -> bool {
        if lanes == 0 {
            return false;
        }
        self.copy_move(warp, at);
        let job = &mut self.copies[warp.number as usize].jobs[at];
        let (to, bytes, pc) = (job.to, job.bytes, job.pc);
        job.lanes &= !lanes;
        let gone = job.lanes == 0;
        for lane in lanes_of(lanes) {
            // Only now does the write get a time that clocks can know. The
            // waiting thread knows it at once, the others through the next
            // barrier.
            if let Ok((block, offset)) = self.shared_at("", warp.block, to[lane], bytes, lane) {
                self.copy_ends(warp, block, offset, bytes, lane, pc);
            }
        }
        if gone {
            self.copies[warp.number as usize].jobs.remove(at);
        }
        gone
    }

    /// Executes `cp.async.mbarrier.arrive`: the lane arrives when its copies
    /// are done.
    pub fn arrive_after_copies(
        &mut self,
        warp: &mut Warp,
        block: usize,
        offset: usize,
        lane: usize,
    ) -> Step<()> {
        // Completing the copies at once is the earliest arrival that the ISA
        // allows. The wait of the consumers stays, so nothing is hidden from
        // them.
        let mut at = 0;
        while at < self.copies[warp.number as usize].jobs.len() {
            let job = &self.copies[warp.number as usize].jobs[at];
            let own = job.lanes & 1 << lane;
            at += usize::from(!self.copy_finish(warp, at, own));
        }
        self.arrive_once(warp, block, offset, lane)
    }

    /// Checks that threads which end have no copies or products in flight.
    pub fn end_threads(&mut self, warp: &mut Warp, mask: u32) -> Step<()> {
        let pending = self.copies[warp.number as usize].pending() & mask;
        if pending != 0 {
            let text = "ends with cp.async copies it has not waited for";
            return Err(Fault::new(FindingKind::PendingAtExit, pending, text));
        }
        self.end_engines(warp, mask)
    }
}
