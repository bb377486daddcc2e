//! The shadow of the global memory that a block touches, for races between the
//! block's own threads. The logs of the launch find races between blocks.

use super::ClusterRunner;
use super::state::global::{ATOMIC, CELLS, GRAIN, GlobalAccess, Other, Stamp};
use super::warp::{Warp, lanes_of};
use crate::finding::{Fault, FindingKind, Step};

impl ClusterRunner<'_> {
    /// Checks and records an ordinary load.
    pub fn global_read(&mut self, warp: &Warp, access: GlobalAccess) -> Step<()> {
        // Accesses of single bytes are left out, because two threads may share
        // a cell of two bytes without a race.
        if !self.launch.full || access.atomic || access.bytes < GRAIN {
            return Ok(());
        }
        let thread = warp.number * 32 + access.lane as u32;
        let (time, known) = (self.time, &warp.known[access.lane]);
        let first = access.offset / GRAIN;
        for cell in first..first + access.bytes / GRAIN {
            let page = self.global.page(access.region, cell / CELLS, true);
            let other = page.and_then(|page| page.read(cell % CELLS, thread, time, known));
            if let Some(other) = other {
                return Err(self.global_clash(warp, access, "reads", &other));
            }
        }
        Ok(())
    }

    /// Checks and records a store or an atomic; `same` says that the bytes do
    /// not change.
    pub fn global_write(&mut self, warp: &Warp, access: GlobalAccess, same: bool) -> Step<()> {
        if !self.launch.full || access.bytes < GRAIN {
            return Ok(());
        }
        let flag = if access.atomic { ATOMIC } else { 0 };
        let by = Stamp {
            time: self.time,
            thread: (warp.number * 32 + access.lane as u32) | flag,
        };
        let (pc, known) = (self.pc, &warp.known[access.lane]);
        let first = access.offset / GRAIN;
        for cell in first..first + access.bytes / GRAIN {
            let page = self.global.page(access.region, cell / CELLS, true);
            let other = page.and_then(|page| page.write(cell % CELLS, by, pc, known));
            match other {
                None => {}
                // Threads of a block may store the same value to one place.
                Some(Other::Wrote { pc: at, .. }) if same && at == pc => {}
                Some(other) => return Err(self.global_clash(warp, access, "writes", &other)),
            }
        }
        Ok(())
    }

    #[cold]
    fn global_clash(
        &self,
        warp: &Warp,
        access: GlobalAccess,
        verb: &str,
        other: &Other,
    ) -> Box<Fault> {
        let (thread, what, pc) = match other {
            Other::Wrote { thread, pc } => (*thread, "writes", Some(*pc)),
            Other::Read { thread } => (*thread, "reads", None),
        };
        let bytes = self.launch.regions.list[access.region].bytes;
        let text = format!(
            "{verb} {} bytes of global memory that {} {what}, and nothing orders the two: \
             byte {} of an allocation of {bytes} bytes",
            access.bytes,
            self.thread_name(warp, thread),
            access.offset
        );
        let mut fault = Fault::new(FindingKind::GlobalRace, 1 << access.lane, text);
        fault.other = pc;
        fault
    }

    /// Checks and records the ordinary loads of several lanes.
    pub fn global_reads(
        &mut self,
        warp: &Warp,
        places: &[(usize, usize); 32],
        bytes: usize,
        mask: u32,
    ) -> Step<()> {
        for lane in lanes_of(mask) {
            let (region, offset) = places[lane];
            self.global_read(
                warp,
                GlobalAccess {
                    region,
                    offset,
                    bytes,
                    lane,
                    atomic: false,
                },
            )?;
        }
        Ok(())
    }
}
