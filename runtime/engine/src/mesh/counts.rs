//! Count exchange: ranks learn how many tokens each has and how many rows go where.

use super::all_to_all::RowSchedule;
use super::mesh_call::MeshCall;
use super::passes::Segment;
use super::rows::{OwnRows, RowMesh, Rows};
use super::settings::{CountWord, Settings};
use super::tp_peers::TpPeers;
use crate::error::EngineError;
use bytemuck::cast_slice;
use moesaic_collectives::{Algorithm, Call, CommElement, Slice, agree};
use moesaic_dist::{CollectiveOp, OpGroup};
use moesaic_plan::{AllToAll, Exchange, TensorId, TokenScope};
use moesaic_target::Buffer;
use std::sync::Arc;

/// Token counts over all ranks, as one rank needs them.
#[derive(Clone, Copy, Debug)]
pub(super) struct StepCounts {
    /// The tokens of all ranks before this one.
    pub before: usize,
    /// The tokens that a capacity is computed from: those of the rank with the most, or of all
    /// ranks.
    pub most: usize,
}

impl MeshCall<'_> {
    /// Exchanges token counts, if the pass needs them, and compares the call's settings on the way.
    pub fn step_counts(
        &mut self,
        segments: &[Segment],
        tokens: usize,
        settings: &Settings,
    ) -> Result<Option<StepCounts>, EngineError> {
        let asks = |segment: &Segment| {
            matches!(
                segment,
                Segment::Exchange(Exchange {
                    op: CollectiveOp::TokenCounts,
                    ..
                })
            )
        };
        if !segments.iter().any(asks) {
            return Ok(None);
        }
        let call = self.call("tokens");
        let own = settings.pack(tokens) as usize;
        let counted = self.gather_count_of(own, OpGroup::World, &call)?;
        let words = counted.into_iter();
        let words = words.map(|counted| Settings::split_word(counted as u64));
        let words: Vec<CountWord> = words.collect();
        let all: Vec<usize> = words.iter().map(|word| word.tokens).collect();
        // All ranks see the same hashes, so all of them enter the second exchange, or none.
        if words.iter().any(|word| word.hash != words[0].hash) {
            self.compare(settings, &call)?;
        }
        Ok(Some(StepCounts {
            before: all[..self.mesh.rank()].iter().sum(),
            most: match self.mesh.scope() {
                TokenScope::Rank => all.iter().copied().max().unwrap_or(0),
                TokenScope::World => all.iter().sum(),
            },
        }))
    }

    /// Returns the error that names the settings that differ.
    fn compare(&mut self, settings: &Settings, call: &Call) -> Result<(), EngineError> {
        let named = settings.named();
        let values: Vec<(&str, &str)> = named.iter().map(|(name, v)| (*name, &**v)).collect();
        Ok(agree(self.group(OpGroup::World), &values, call)?)
    }

    /// Gathers one number from every rank of a group.
    fn gather_count_of(
        &mut self,
        own: usize,
        group: OpGroup,
        call: &Call,
    ) -> Result<Vec<usize>, EngineError> {
        let all = self.gather_counts_of(&[own as u64], group, call)?;
        let number = |own: Vec<usize>| own.first().copied().unwrap_or(0);
        Ok(all.into_iter().map(number).collect())
    }

    /// Gathers numbers from every rank of a group.
    pub fn gather_counts_of(
        &mut self,
        own: &[u64],
        group: OpGroup,
        call: &Call,
    ) -> Result<Vec<Vec<usize>>, EngineError> {
        let group = self.group(group);
        let all = group.gather_numbers(own, call)?.into_iter();
        Ok(all
            .map(|own| own.into_iter().map(|n| n as usize).collect())
            .collect())
    }

    /// Exchanges row counts: every rank learns how many rows arrive from where.
    pub fn count(&mut self) -> Result<Rows, EngineError> {
        let row_mesh = self.row_mesh();
        let RowMesh { mesh, place } = row_mesh;
        self.count_own()?;
        let (placement, own) = (self.plan.row_placement(), Arc::clone(&self.counts.own));
        let device = &*self.parts.tokens.layer.device;
        let sent = Rows::send_counts(row_mesh, &placement, &own);
        let algorithm = match self.transfers.row_schedule {
            RowSchedule::Direct => Algorithm::Direct,
            RowSchedule::OverNodes(algorithm) => algorithm,
            RowSchedule::Dedup(shape) => AllToAll::Dedup.row().algorithm(shape),
        };
        if self.transfers.row_schedule != RowSchedule::Direct {
            let call = self.call("counts");
            let group = self.group(OpGroup::Ep);
            let (counted, hop_counts) = Rows::exchange_counts(group, algorithm, &sent, &call)?;
            let mut rows = Rows::new(row_mesh, placement, own, &counted);
            rows.hop_counts = Some(hop_counts);
            return self.exchange_dedup_map(rows);
        }
        let here = placement.count(place.ep);
        let mut counted = vec![0i64; here * mesh.group()];
        let buffer = |count: usize| Ok::<_, EngineError>(Arc::new(device.alloc(8 * count.max(8))?));
        let (input, output) = (buffer(sent.counts.len())?, buffer(counted.len())?);
        device.upload(cast_slice(&sent.counts), &input, 0)?;
        let slice = |buffer: &Arc<Buffer>, count| Slice::new(buffer, CommElement::I64, 0, count);
        let (input, output) = (
            slice(&input, sent.counts.len())?,
            slice(&output, counted.len())?,
        );
        let receives = vec![here; mesh.group()];
        let call = self.call("counts");
        let rows = self.group(OpGroup::Ep);
        rows.all_to_all_v(&input, &sent.sizes, &output, &receives, algorithm, &call)?
            .wait()?;
        device.download(output.buffer(), 0, bytemuck::cast_slice_mut(&mut counted))?;
        Ok(Rows::new(row_mesh, placement, own, &counted))
    }

    /// Downloads where the rows of this rank's tokens begin, once the scan has run.
    pub fn count_own(&mut self) -> Result<(), EngineError> {
        // The choice of shadows has read them already; a second download would wait for the device
        // again.
        if !self.counts.own.offsets.is_empty() {
            return Ok(());
        }
        let mut offsets = vec![0i64; self.plan.tokens.spec.shape.experts + 1];
        let from = self
            .parts
            .tokens
            .named("offsets")
            .expect("a scan has offsets");
        let bytes = bytemuck::cast_slice_mut(&mut offsets);
        self.parts.tokens.layer.device.download(from, 0, bytes)?;
        let offsets = offsets.into_iter().map(|row| row as usize).collect();
        self.counts.own = Arc::new(OwnRows {
            offsets,
            ..OwnRows::default()
        });
        Ok(())
    }

    /// Exchanges which rows belong to one token, for deduplicated dispatch.
    fn exchange_dedup_map(&mut self, mut rows: Rows) -> Result<Rows, EngineError> {
        let RowSchedule::Dedup(shape) = self.transfers.row_schedule else {
            return Ok(rows);
        };
        let (device, call) = (
            &*self.parts.tokens.layer.device,
            self.call("tokens of rows"),
        );
        let mut slots = vec![0i32; rows.of_tokens()];
        let from = self.parts.tokens.named("row_slots");
        let from = from.expect("a scan says which slot a row is of");
        device.download(from, 0, bytemuck::cast_slice_mut(&mut slots))?;
        let top_k = self.plan.tokens.spec.shape.top_k as i32;
        let tokens: Vec<u32> = slots.iter().map(|slot| (slot / top_k) as u32).collect();
        let group = self.group(OpGroup::Ep);
        rows.exchange_dedup_map(group, device, shape, &tokens, &call)?;
        Ok(rows)
    }

    /// Exchanges token counts among TP peers.
    pub fn count_tp_peers(&mut self, exchange: &Exchange) -> Result<TpPeers, EngineError> {
        let (tokens, call) = (
            self.parts.tokens.scalars().tokens(),
            self.call(&exchange.name),
        );
        let counts = self.gather_count_of(tokens, OpGroup::SharedTp, &call)?;
        Ok(TpPeers::new(counts, self.mesh.place().tp))
    }

    /// Counts the tokens of all ranks that have an expert.
    pub fn count_live(
        &mut self,
        ids: TensorId,
        to: TensorId,
        call: &Call,
    ) -> Result<(), EngineError> {
        let device = &*self.parts.tokens.layer.device;
        let (tokens, top_k) = (
            self.parts.tokens.scalars().tokens(),
            self.plan.tokens.spec.shape.top_k,
        );
        let mut choices = vec![0i32; tokens * top_k];
        let bytes = bytemuck::cast_slice_mut(&mut choices);
        device.download(self.parts.tokens.buffer(ids), 0, bytes)?;
        let has_one = |ids: &&[i32]| ids.iter().any(|id| *id >= 0);
        let own = choices.chunks(top_k).filter(has_one).count();
        let all: usize = self
            .gather_count_of(own, OpGroup::World, call)?
            .iter()
            .sum();
        device.upload(&(all as i64).to_le_bytes(), self.parts.tokens.buffer(to), 0)?;
        Ok(())
    }
}
