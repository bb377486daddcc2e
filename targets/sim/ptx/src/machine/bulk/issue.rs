//! The issue of bulk copies: all checks are made here.

use super::Line;
use crate::code::layout::RANK_SHIFT;
use crate::code::op::{self, Address, AtomicKind, Direction, NONE, Number, TensorCopy};
use crate::finding::{Fault, FindingKind, Step};
use crate::machine::ClusterRunner;
use crate::machine::access::{self, addresses, misaligned};
use crate::machine::shadow::Accessor;
use crate::machine::state::bulk::Action;
use crate::machine::state::sync::{CompletionStep, Component};
use crate::machine::warp::{Flow, Warp, lanes_of};
use crate::memory::Touch;
use crate::text::StateSpace;
use moesaic_hardware::tensor_map::{ElementType, TensorMap};
use moesaic_hardware::tma::{self, BoxPiece, BulkReduction};

impl ClusterRunner<'_> {
    pub fn bulk(&mut self, warp: &mut Warp, op: &op::BulkOp, mask: u32) -> Step<Flow> {
        if op.direction == Direction::PrefetchL2 {
            return Ok(Flow::Next);
        }
        let (to, from) = (addresses(warp, &op.to), addresses(warp, &op.from));
        let bytes = *warp.word(op.bytes);
        for lane in lanes_of(mask) {
            let (shared, other) = match op.direction {
                Direction::GlobalToShared => (to[lane], from[lane]),
                _ => (from[lane], to[lane]),
            };
            let size = bytes[lane];
            // PTX ISA, "cp.async.bulk": both addresses and the size must be
            // multiples of 16.
            for address in [shared, other, u64::from(size)] {
                if !address.is_multiple_of(16) {
                    return Err(misaligned(
                        1 << lane,
                        "bulk-copies",
                        16,
                        StateSpace::Generic,
                        address,
                    ));
                }
            }
            if op.direction == Direction::SharedToCluster {
                self.send(warp, op, (to[lane], from[lane]), size, lane)?;
                continue;
            }
            let moves = (0..size).step_by(16).map(|at| BoxPiece {
                shared: (shared as u32).wrapping_add(at) & ((1 << RANK_SHIFT) - 1),
                global: Some(other + u64::from(at)),
                bytes: 16,
            });
            let line = Line {
                lane,
                shared,
                bytes: size,
                moves: moves.collect(),
                fill: [0; 16],
                is_box: false,
            };
            let reduction = self.reduction(op.reduction.as_ref(), None, lane)?;
            match op.direction {
                Direction::GlobalToShared => {
                    self.bulk_load(warp, line, op.mbarrier.as_ref(), op.multicast)?;
                }
                _ => self.bulk_store(warp, line, reduction)?,
            }
        }
        Ok(Flow::Next)
    }

    pub fn tensor_copy(&mut self, warp: &mut Warp, op: &TensorCopy, mask: u32) -> Step<Flow> {
        let (maps, shared) = (addresses(warp, &op.map), addresses(warp, &op.shared));
        for lane in lanes_of(mask) {
            let map = self.tensor_map(maps[lane], lane)?;
            let list = op.coordinates.iter();
            let coordinates: Vec<i32> = list
                .map(|row| warp.word(*row)[lane].cast_signed())
                .collect();
            let invalid = |text: String| Fault::new(FindingKind::Operand, 1 << lane, text);
            let offset = shared[lane] as u32 & ((1 << RANK_SHIFT) - 1);
            // The box is cut into moves at the issue: coordinates live in
            // registers, which change before the copy runs.
            let mut moves = Vec::new();
            tma::box_moves(&map, &coordinates, offset, |own| moves.push(own))
                .map_err(|error| invalid(error.to_string()))?;
            let line = Line {
                lane,
                shared: shared[lane],
                bytes: map.box_bytes(),
                moves,
                fill: tma::fill(&map),
                is_box: true,
            };
            let reduction = self.reduction(op.reduction.as_ref(), Some(map.element), lane)?;
            match op.direction {
                Direction::GlobalToShared => {
                    self.bulk_load(warp, line, op.mbarrier.as_ref(), op.multicast)?;
                }
                _ => self.bulk_store(warp, line, reduction)?,
            }
        }
        Ok(Flow::Next)
    }

    /// Returns the tensor map at a generic address: a parameter, or global
    /// memory.
    fn tensor_map(&mut self, address: u64, lane: usize) -> Step<TensorMap> {
        let mut bytes = [0; 128];
        // A `CUtensorMap` is aligned to 64 bytes (CUDA driver API,
        // `cuTensorMapEncodeTiled`).
        if !address.is_multiple_of(64) {
            let space = StateSpace::Generic;
            return Err(misaligned(
                1 << lane,
                "reads a tensor map of",
                64,
                space,
                address,
            ));
        }
        match access::space_of(address) {
            (StateSpace::Param, offset) => {
                let offset = offset as usize;
                let own = self
                    .launch
                    .params
                    .get(offset..offset + 128)
                    .ok_or_else(|| {
                        let place = "beyond the parameters";
                        access::outside(1 << lane, "reads", 128, StateSpace::Param, address, place)
                    })?;
                bytes.copy_from_slice(own);
            }
            _ => {
                let (region, offset) = self.global_bytes("reads", address, 128, lane as u32)?;
                self.launch.regions.list[region].copy_out(offset, &mut bytes);
            }
        }
        TensorMap::decode(&bytes).map_err(|error| {
            Fault::new(
                FindingKind::Operand,
                1 << lane,
                format!("no tensor map: {error}"),
            )
        })
    }

    fn reduction(
        &self,
        asked: Option<&op::ReductionOp>,
        element: Option<ElementType>,
        lane: usize,
    ) -> Step<Option<(BulkReduction, ElementType)>> {
        let Some(asked) = asked else {
            return Ok(None);
        };
        let kind = match asked.kind {
            AtomicKind::Add => Some(BulkReduction::Add),
            AtomicKind::Min => Some(BulkReduction::Min),
            AtomicKind::Max => Some(BulkReduction::Max),
            AtomicKind::And => Some(BulkReduction::And),
            AtomicKind::Or => Some(BulkReduction::Or),
            AtomicKind::Xor => Some(BulkReduction::Xor),
            _ => None,
        };
        let element = element.or_else(|| asked.ty.and_then(element_of));
        match kind.zip(element) {
            Some(pair) => Ok(Some(pair)),
            None => {
                let text = "a reduction that TMA does not have";
                Err(Fault::new(FindingKind::Operand, 1 << lane, text))
            }
        }
    }

    /// Returns the blocks that a load goes to: the block of the address, or the
    /// blocks of the multicast mask.
    fn targets(&self, warp: &Warp, shared: u64, multicast: u16, lane: usize) -> Vec<usize> {
        if multicast == NONE {
            // Rank 0 in an address stands for the thread's own block, so ranks
            // are stored plus one.
            let rank = (shared >> RANK_SHIFT) as usize & 0xff;
            return vec![rank.checked_sub(1).unwrap_or(warp.block as usize)];
        }
        let mask = warp.word(multicast)[lane];
        (0..16).filter(|rank| mask >> rank & 1 == 1).collect()
    }

    fn bulk_load(
        &mut self,
        warp: &Warp,
        line: Line,
        mbarrier: Option<&Address>,
        multicast: u16,
    ) -> Step<()> {
        let lane = line.lane;
        let mbarrier = mbarrier.map_or(0, |address| addresses(warp, address)[lane]);
        let blocks = self.targets(warp, line.shared, multicast, lane);
        let mut phases = Vec::new();
        let offset = mbarrier & ((1 << RANK_SHIFT) - 1);
        // A multicast load writes at the same offset in every block and signals
        // the mbarrier at the same offset there (PTX ISA,
        // "cp.async.bulk.tensor": .multicast::cluster), so each block is
        // checked.
        for block in &blocks {
            let address = (*block as u64 + 1) << RANK_SHIFT | offset;
            self.shared_at("signals", warp.block, address, 8, lane)?;
            self.check_signal(warp, *block, offset as usize, lane)?;
            let step = self
                .phase_under_way(*block, offset as usize)
                .unwrap_or_default();
            phases.push(step.step);
            self.box_starts(warp, *block, &line, step)?;
        }
        // The reads are logged at the issue, like those of a thread. The log
        // finds the writes of other blocks that race with them.
        for own in &line.moves {
            if let Some(global) = own.global {
                let bytes = own.bytes as usize;
                let (region, at) = self.global_bytes("copies", global, bytes, lane as u32)?;
                match self.note_read(false, region, at, bytes, 1 << lane) {
                    // A box may cover rows that nobody has written. They arrive
                    // as NaN, so a result that depends on them shows.
                    Err(fault) if line.is_box && fault.kind == FindingKind::UninitialisedGlobal => {
                        self.log.touch(Touch::Read, region, at, bytes, self.pc);
                    }
                    other => other?,
                }
                self.tally.async_load_bytes += u64::from(own.bytes);
            }
        }
        self.enqueue(warp, line, |line| Action::Load {
            from: None,
            blocks,
            mbarrier: offset as usize,
            phases,
            bytes: line.bytes,
            fill: line.fill,
        });
        Ok(())
    }

    /// Checks that TMA may use the mbarrier: its init must be fenced for the
    /// async proxy.
    fn check_signal(&mut self, warp: &Warp, block: usize, offset: usize, lane: usize) -> Step<()> {
        if !self.is_mbarrier(block, offset) {
            let text = format!("signals the mbarrier at {offset:#x}, which was not initialised");
            return Err(Fault::new(FindingKind::Mbarrier, 1 << lane, text));
        }
        if !self.launch.full {
            return Ok(());
        }
        let known = &warp.known[lane];
        // A plain `__syncthreads` is not enough after `mbarrier.init` (PTX ISA,
        // "fence.mbarrier_init", and the CUTLASS pipelines): TMA reads the
        // barrier through the async proxy.
        let result = self.blocks[block]
            .shadow
            .check_engine_read(known, offset, 8);
        result.map_err(|clash| self.clash(warp, 1 << lane, ("lets TMA use", offset, 8), clash))
    }

    /// Checks the destination of a box, which from now on belongs to TMA alone.
    fn box_starts(
        &mut self,
        warp: &Warp,
        block: usize,
        line: &Line,
        step: CompletionStep,
    ) -> Step<()> {
        let (lane, bytes) = (line.lane, line.bytes as usize);
        let offset = (line.shared & ((1 << RANK_SHIFT) - 1)) as usize;
        let address = (block as u64 + 1) << RANK_SHIFT | offset as u64;
        // First and last 16 bytes are enough for the bounds: a box is dense in
        // shared memory, and the swizzle stays within the box's atoms.
        for at in [0, bytes.saturating_sub(16)] {
            self.shared_at("copies to", warp.block, address + at as u64, 16, lane)?;
        }
        if !self.launch.full {
            return Ok(());
        }
        let by = Accessor {
            warp: warp.number,
            lanes: 1 << lane,
            time: self.time,
            known: &warp.known[lane],
            atomic: false,
            pc: self.pc,
        };
        let shadow = &mut self.blocks[block].shadow;
        // A write by TMA after ordinary reads needs no proxy fence, but it
        // needs the order: the readers must have arrived at a barrier that this
        // thread has waited for.
        if let Err(clash) = shadow.check_write(&by, offset, bytes) {
            return Err(self.clash(warp, 1 << lane, ("copies to", offset, bytes), clash));
        }
        shadow.engine_write(step.component, step.step, self.pc, offset, bytes);
        Ok(())
    }

    /// Copies to another block of the cluster.
    fn send(
        &mut self,
        warp: &Warp,
        op: &op::BulkOp,
        (to, from): (u64, u64),
        bytes: u32,
        lane: usize,
    ) -> Step<()> {
        let low = (1 << RANK_SHIFT) - 1;
        let (source, _) = self.shared_at("copies", warp.block, from, 16, lane)?;
        self.engine_source(
            warp,
            source,
            (from & low) as usize,
            bytes as usize,
            lane,
            None,
        )?;
        let moves = (0..bytes).step_by(16).map(|at| BoxPiece {
            shared: (to & low) as u32 + at,
            global: Some((from & low) + u64::from(at)),
            bytes: 16,
        });
        let line = Line {
            lane,
            shared: to,
            bytes,
            moves: moves.collect(),
            fill: [0; 16],
            is_box: false,
        };
        let mbarrier = op.mbarrier.as_ref();
        let mbarrier = mbarrier.map_or(0, |address| addresses(warp, address)[lane]);
        let (block, offset) = self.shared_at("signals", warp.block, mbarrier, 8, lane)?;
        self.check_signal(warp, block, offset, lane)?;
        let step = self.phase_under_way(block, offset).unwrap_or_default();
        self.box_starts(warp, block, &line, step)?;
        self.enqueue(warp, line, |line| Action::Load {
            from: Some(source),
            blocks: vec![block],
            mbarrier: offset,
            phases: vec![step.step],
            bytes: line.bytes,
            fill: line.fill,
        });
        Ok(())
    }

    /// Checks that TMA sees what threads wrote to its source in shared memory.
    fn engine_source(
        &mut self,
        warp: &Warp,
        block: usize,
        offset: usize,
        bytes: usize,
        lane: usize,
        step: Option<CompletionStep>,
    ) -> Step<()> {
        let address = (block as u64 + 1) << RANK_SHIFT | offset as u64;
        for at in [0, bytes.saturating_sub(16)] {
            self.shared_at("copies", warp.block, address + at as u64, 16, lane)?;
        }
        if !self.launch.full {
            return Ok(());
        }
        let known = &warp.known[lane];
        let shadow = &mut self.blocks[block].shadow;
        if let Err(clash) = shadow.check_engine_read(known, offset, bytes) {
            return Err(self.clash(warp, 1 << lane, ("copies", offset, bytes), clash));
        }
        // The source must stay as it is until the group was waited for, so
        // reads are recorded for the writes that come.
        if let Some(CompletionStep { component, step }) = step {
            for at in (0..bytes).step_by(16) {
                shadow.engine_reads(component, step, offset + at);
            }
        }
        Ok(())
    }

    fn bulk_store(
        &mut self,
        warp: &Warp,
        line: Line,
        reduction: Option<(BulkReduction, ElementType)>,
    ) -> Step<()> {
        let lane = line.lane;
        let thread = warp.number * 32 + lane as u32;
        let (block, offset) = self.shared_at("copies", warp.block, line.shared, 16, lane)?;
        let groups = self.bulk.threads.entry(thread).or_default();
        groups.open = true;
        let group = groups.committed + 1;
        let component = self.component(Component::Bulk { thread });
        let step = Some(CompletionStep {
            component,
            step: group,
        });
        self.engine_source(warp, block, offset, line.bytes as usize, lane, step)?;
        for own in &line.moves {
            let Some(global) = own.global else {
                continue;
            };
            let bytes = own.bytes as usize;
            let (region, at) = self.global_bytes("copies to", global, bytes, lane as u32)?;
            // A reduction reads the old bytes, so they have to be there.
            if reduction.is_some() {
                self.note_read(false, region, at, bytes, 1 << lane)?;
            }
            let touch = match reduction {
                Some(_) => Touch::Atomic,
                None => Touch::Write,
            };
            self.log.touch(touch, region, at, bytes, self.pc);
            self.tally.async_store_bytes += u64::from(own.bytes);
        }
        self.enqueue(warp, line, |_| Action::Store {
            block,
            group,
            reduction,
        });
        Ok(())
    }
}

fn element_of(ty: Number) -> Option<ElementType> {
    Some(match ty {
        Number::U8 => ElementType::U8,
        Number::U16 => ElementType::U16,
        Number::U32 => ElementType::U32,
        Number::S32 => ElementType::S32,
        Number::U64 => ElementType::U64,
        Number::S64 => ElementType::S64,
        Number::F16 => ElementType::F16,
        Number::Bf16 => ElementType::Bf16,
        Number::F32 => ElementType::F32,
        Number::F64 => ElementType::F64,
        _ => return None,
    })
}
