//! `mma.sync`, `ldmatrix` and `stmatrix`.

use super::ClusterRunner;
use super::access::{SpacePart, addresses};
use super::warp::{Flow, Warp, Words, lanes_of};
use crate::code::op::{MatrixOp, MemoryOrder, Mma};
use crate::finding::{Fault, FindingKind, Step};
use crate::text::StateSpace;
use moesaic_hardware::{matrix, mma};

/// Bytes in a row of an 8 x 8 matrix.
const ROW: usize = 16;

impl ClusterRunner<'_> {
    pub fn mma(&mut self, warp: &mut Warp, op: &Mma, mask: u32) -> Step<Flow> {
        if let Some(flow) = self.whole_warp(warp, mask) {
            return Ok(flow);
        }
        // A block whose size is no multiple of 32 has a short last warp.
        // Fragments are spread over all 32 lanes, so the instruction is
        // undefined there.
        if mask != u32::MAX {
            return Err(short_warp(mask));
        }
        let take = |rows: &[u16]| {
            let mut list = [[0; 32]; 4];
            for (own, row) in list.iter_mut().zip(rows) {
                *own = *warp.word(*row);
            }
            list
        };
        let (a, b, c) = (take(&op.a), take(&op.b), take(&op.c));
        let mut d: [Words; 4] = [[0; 32]; 4];
        let (na, nb, nc) = (op.a.len(), op.b.len(), op.c.len());
        mma::mma_sync(op.kind, &a[..na], &b[..nb], &c[..nc], &mut d[..nc]);
        for (row, value) in op.d.iter().zip(&d) {
            warp.put(*row, value, mask);
        }
        self.tally.multiply_adds += 16 * 8 * op.kind.k() as u64;
        Ok(Flow::Next)
    }

    pub fn matrix(&mut self, warp: &mut Warp, op: &MatrixOp, mask: u32) -> Step<Flow> {
        if let Some(flow) = self.whole_warp(warp, mask) {
            return Ok(flow);
        }
        if mask != u32::MAX {
            return Err(short_warp(mask));
        }
        // Only the lanes whose addresses the form uses: 8 per matrix. The
        // others may hold anything (PTX ISA, "ldmatrix": threads 0-7, 8-15,
        // ...).
        let lanes = 8 * op.rows.len();
        let used = (u64::from(u32::MAX) >> (32 - lanes)) as u32;
        let space = match op.space {
            StateSpace::Generic => StateSpace::Generic,
            _ => StateSpace::Shared,
        };
        let parts = self.resolve(space, &addresses(warp, &op.address), used);
        let [
            SpacePart {
                space: StateSpace::Shared,
                addresses,
                ..
            },
        ] = &parts[..]
        else {
            let text = "a matrix has to be in shared memory";
            return Err(Fault::new(FindingKind::OutOfBounds, used, text));
        };
        self.tally.shared(addresses, used, ROW as u64);
        if op.store {
            self.matrix_store(warp, op, addresses)?
        } else {
            self.matrix_load(warp, op, addresses)?
        }
        Ok(Flow::Next)
    }

    fn matrix_load(&mut self, warp: &mut Warp, op: &MatrixOp, addresses: &[u64; 32]) -> Step<()> {
        for (number, d) in op.rows.iter().enumerate() {
            let mut rows = [[0; ROW]; 8];
            for (at, row) in rows.iter_mut().enumerate() {
                let lane = matrix::address_lane(number, at);
                let (block, offset) =
                    self.shared_at("reads", warp.block, addresses[lane], ROW, lane)?;
                self.shared_read(warp, block, offset, ROW, 1 << lane, MemoryOrder::Weak)?;
                row.copy_from_slice(&self.blocks[block].shared[offset..offset + ROW]);
            }
            let value = matrix::load(&rows, op.transposed);
            warp.put(*d, &value, u32::MAX);
        }
        Ok(())
    }

    fn matrix_store(&mut self, warp: &mut Warp, op: &MatrixOp, addresses: &[u64; 32]) -> Step<()> {
        for (number, row) in op.rows.iter().enumerate() {
            let rows = matrix::store(warp.word(*row), op.transposed);
            for (at, row) in rows.iter().enumerate() {
                let lane = matrix::address_lane(number, at);
                let (block, offset) =
                    self.shared_at("writes", warp.block, addresses[lane], ROW, lane)?;
                self.shared_write(warp, block, offset, row, lane, MemoryOrder::Weak)?;
                self.blocks[block].shared[offset..offset + ROW].copy_from_slice(row);
            }
        }
        Ok(())
    }
}

fn short_warp(mask: u32) -> Box<Fault> {
    let lanes = lanes_of(mask).count();
    let text = format!("a matrix instruction in a warp of {lanes} threads; it needs all 32");
    Fault::new(FindingKind::PartialWarp, mask, text)
}
