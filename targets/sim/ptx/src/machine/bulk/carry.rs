//! The execution of bulk copies.

use crate::finding::{Fault, FaultPlace, FindingKind, Step};
use crate::machine::ClusterRunner;
use crate::machine::access::little;
use crate::machine::state::bulk::{Action, BulkCopy};
use moesaic_hardware::mbarrier::Mbarrier;
use moesaic_hardware::tensor_map::ElementType;
use moesaic_hardware::tma::{self, BoxPiece, BulkReduction};

impl ClusterRunner<'_> {
    pub fn carry_out(&mut self, job: BulkCopy) -> Step<()> {
        match &job.action {
            Action::Load {
                from,
                blocks,
                mbarrier,
                phases,
                bytes,
                fill,
            } => {
                for (block, phase) in blocks.iter().zip(phases) {
                    for own in &job.moves {
                        self.deliver_move(*from, *block, own, fill);
                    }
                    self.signal(&job, *block, *mbarrier, *phase, *bytes)?;
                }
            }
            Action::Store {
                block, reduction, ..
            } => {
                for own in &job.moves {
                    self.store_move(*block, own, *reduction, &job)?;
                }
            }
        }
        Ok(())
    }

    fn deliver_move(&mut self, from: Option<usize>, block: usize, own: &BoxPiece, fill: &[u8; 16]) {
        let (at, bytes) = (own.shared as usize, own.bytes as usize);
        // Moves outside the tensor keep the fill value.
        let mut data = *fill;
        match (own.global, from) {
            (Some(offset), Some(source)) => {
                let offset = offset as usize;
                let own = self.blocks[source].shared.get(offset..offset + bytes);
                data[..bytes].copy_from_slice(own.unwrap_or(&fill[..bytes]));
            }
            (Some(global), None) => {
                if let Some(region) = self.launch.regions.find(global, bytes, self.hint) {
                    let region = &self.launch.regions.list[region];
                    region.copy_out((global - region.base) as usize, &mut data[..bytes]);
                }
            }
            (None, _) => {}
        }
        if let Some(to) = self.blocks[block].shared.get_mut(at..at + bytes) {
            to.copy_from_slice(&data[..bytes]);
        }
    }

    /// Counts the bytes of a copy on its mbarrier.
    fn signal(
        &mut self,
        job: &BulkCopy,
        block: usize,
        offset: usize,
        phase: u32,
        bytes: u32,
    ) -> Step<()> {
        let place = FaultPlace {
            pc: job.pc,
            block: self.warps[job.thread as usize / 32].block,
            threads: vec![self.thread_in_block(job.thread)],
        };
        let fault = |text: String| {
            let mut fault = Fault::new(FindingKind::Mbarrier, 0, text);
            fault.at = Some(place.clone());
            fault
        };
        let in_flight = self
            .phase_under_way(block, offset)
            .map_or(0, |own| own.step);
        // The phase at the issue must still be the current one. A phase that
        // went on means that the mbarrier completed without these bytes.
        if in_flight != phase {
            return Err(fault(format!(
                "{bytes} bytes of a bulk copy arrive at the mbarrier at {offset:#x} after its \
                 phase is over: expect_tx announced too few bytes"
            )));
        }
        let word = little(&self.blocks[block].shared[offset..offset + 8]);
        let result = Mbarrier::load(word).and_then(|mut own| {
            let completed = own.complete_tx(bytes)?;
            Ok((own, completed))
        });
        let (own, completed) =
            result.map_err(|error| fault(format!("mbarrier at {offset:#x}: {error}")))?;
        self.put_mbarrier(block, offset, own.store());
        if completed {
            self.mbarrier_phase(block, offset).map_err(|mut fault| {
                fault.at = Some(place.clone());
                fault
            })?;
        }
        Ok(())
    }

    fn store_move(
        &mut self,
        block: usize,
        own: &BoxPiece,
        reduction: Option<(BulkReduction, ElementType)>,
        job: &BulkCopy,
    ) -> Step<()> {
        let (at, bytes) = (own.shared as usize, own.bytes as usize);
        let Some(global) = own.global else {
            return Ok(());
        };
        let Some(region) = self.launch.regions.find(global, bytes, self.hint) else {
            return Ok(());
            // The region was checked at the issue. A buffer freed since then would
            // be a fault of the host and not of the kernel.
        };
        let region = &self.launch.regions.list[region];
        let offset = (global - region.base) as usize;
        let new = &self.blocks[block].shared[at..at + bytes];
        let Some((kind, element)) = reduction else {
            region.copy_in(offset, new);
            return Ok(());
        };
        let mut data = [0; 16];
        region.copy_out(offset, &mut data[..bytes]);
        if let Err(error) = tma::reduce(kind, element, &mut data[..bytes], new) {
            let mut fault = Fault::new(FindingKind::Operand, 0, error.to_string());
            fault.at = Some(FaultPlace {
                pc: job.pc,
                block: self.warps[job.thread as usize / 32].block,
                threads: vec![self.thread_in_block(job.thread)],
            });
            return Err(fault);
        }
        region.copy_in(offset, &data[..bytes]);
        Ok(())
    }
}
