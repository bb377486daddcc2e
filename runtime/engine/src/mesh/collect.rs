//! Tensors of all ranks, written by the first as those of one process.

use super::ranks::{Among, Ranks};
use super::shard::{beside, hidden_dimension};
use crate::error::EngineError;
use moesaic_collectives::{Call, Element, Slice, Transfer};
use moesaic_plan::Place;
use moesaic_tensor::{Described, SourceError, Tensor, Tensors, WeightSink};
use std::ops::Range;
use std::time::Duration;

/// Bytes of a piece, of each slice; at least one expert.
const PIECE: usize = 16 << 20;

/// How long ranks wait that have nothing to write.
const PATIENCE: Duration = Duration::from_secs(3600);

impl Ranks {
    /// Gives the sink of the first rank the tensors that all ranks hold, as one process
    /// would have them, in the order of their names. Parts of other ranks are fetched a
    /// piece at a time. Sinks of other ranks are left alone.
    ///
    /// # Errors
    /// [`EngineError::Save`] on all ranks when the sink fails; [`EngineError::Collective`].
    pub fn collect(&self, own: &Tensors<'_>, sink: &mut dyn WeightSink) -> Result<(), EngineError> {
        // Replicas have the same.
        let failure = match self.mesh().place().dp {
            0 => self.gathered(own, sink)?.err(),
            _ => None,
        };
        let failure = failure.map_or(String::new(), |error| error.to_string());
        let call = Call::new("tensors of all are saved").within(PATIENCE);
        let all = self
            .mesh()
            .groups()
            .world
            .gather_bytes(failure.as_bytes(), &call)?;
        match all.into_iter().find(|failure| !failure.is_empty()) {
            None => Ok(()),
            Some(failure) => Err(EngineError::Save(
                String::from_utf8_lossy(&failure).into_owned(),
            )),
        }
    }

    /// The outer result is of the exchange, which goes on when the sink has failed.
    fn gathered(
        &self,
        own: &Tensors<'_>,
        sink: &mut dyn WeightSink,
    ) -> Result<Result<(), SourceError>, EngineError> {
        let first = self.mesh().rank() == 0;
        let experts = self.experts(own)?;
        let mut written = Ok(());
        let mut then = |act: &mut dyn FnMut(&mut dyn WeightSink) -> Result<(), SourceError>| {
            if first && written.is_ok() {
                written = act(sink);
            }
        };
        let all: Vec<Described> = own
            .iter()
            .zip(&experts)
            .map(|((name, tensor), counts)| self.whole(name, tensor, counts))
            .collect();
        then(&mut |sink| sink.begin(&all));
        for ((name, tensor), counts) in own.iter().zip(&experts) {
            if Among::of(name) == Among::World {
                then(&mut |sink| sink.write(&tensor.data));
                continue;
            }
            for (ep, rows) in pieces(tensor, counts) {
                let piece = self.piece(name, tensor, ep, rows)?;
                then(&mut |sink| sink.write(&piece));
            }
        }
        then(&mut |sink| sink.end());
        Ok(written)
    }

    /// For each tensor how many experts of it each group of ranks has.
    fn experts(&self, own: &Tensors<'_>) -> Result<Vec<Vec<usize>>, EngineError> {
        let count = |(name, tensor): (&String, &Tensor<'_>)| match Among::of(name) {
            Among::World => 0,
            _ => tensor.shape.first().copied().unwrap_or(0) as u64,
        };
        let counts: Vec<u8> = own
            .iter()
            .flat_map(|each| count(each).to_le_bytes())
            .collect();
        let all = self.gather_bytes(&counts, Among::Group, "experts of all")?;
        let shards = self.mesh().parallel().shards;
        let of = |tensor: usize| {
            let firsts = all.iter().step_by(shards);
            let number = |bytes: &Vec<u8>| {
                let bytes = bytes.get(8 * tensor..8 * tensor + 8).unwrap_or_default();
                u64::from_le_bytes(bytes.try_into().unwrap_or_default()) as usize
            };
            firsts.map(number).collect()
        };
        if let Some(other) = all.iter().position(|bytes| bytes.len() != counts.len()) {
            let (here, there) = (counts.len() / 8, all[other].len() / 8);
            let message = format!("{here} tensors here, {there} in part {other} of the layer");
            return Err(EngineError::Save(message));
        }
        Ok((0..own.len()).map(of).collect())
    }

    /// A tensor as one process has it.
    fn whole(&self, name: &str, tensor: &Tensor<'_>, counts: &[usize]) -> Described {
        let mut shape = tensor.shape.clone();
        if Among::of(name) != Among::World {
            if let Some(experts) = shape.first_mut() {
                *experts = counts.iter().sum();
            }
            if let Some(width) = hidden_dimension(name).and_then(|at| shape.get_mut(at)) {
                *width *= self.mesh().parallel().shards;
            }
        }
        Described {
            name: name.to_string(),
            dtype: tensor.dtype,
            shape,
        }
    }

    /// Some experts of a group of ranks, put together on the first rank; nothing elsewhere.
    fn piece(
        &self,
        name: &str,
        tensor: &Tensor<'_>,
        ep: usize,
        rows: Range<usize>,
    ) -> Result<Vec<u8>, EngineError> {
        let (mesh, Place { ep: own, shard, .. }) = (self.mesh().parallel(), self.mesh().place());
        let dimension = hidden_dimension(name).filter(|_| mesh.shards > 1);
        let slices = dimension.map_or(1, |_| mesh.shards);
        let bytes = row_bytes(tensor) * rows.len();
        let at = rows.start * row_bytes(tensor);
        let mut sends = Vec::new();
        if own == ep && shard < slices {
            let buffer = self.buffer(&tensor.data[at..at + bytes])?;
            let slice = Slice::new(&buffer, Element::U8, 0, bytes)?;
            sends.push(Transfer { peer: 0, slice });
        }
        let first = self.mesh().rank() == 0;
        let room = if first { slices * bytes } else { 0 };
        let buffer = self.buffer(&vec![0; room])?;
        let from = (0..slices).filter(|_| first).map(|shard| {
            let slice = Slice::new(&buffer, Element::U8, shard * bytes, bytes)?;
            let peer = ep * mesh.shards + shard;
            Ok(Transfer { peer, slice })
        });
        let receives = from.collect::<Result<Vec<_>, EngineError>>()?;
        let call = Call::new(&format!("saving {name}"));
        let mut groups = self.mesh().groups();
        groups.rows.exchange(&sends, &receives, &call)?.wait()?;
        let mut all = vec![0; room];
        self.device().download(&buffer, 0, &mut all)?;
        let Some(dimension) = dimension.filter(|_| first) else {
            return Ok(all);
        };
        let mut shape = tensor.shape.clone();
        shape[0] = rows.len();
        let parts: Vec<Tensor<'_>> = all
            .chunks_exact(bytes.max(1))
            .map(|part| Tensor {
                dtype: tensor.dtype,
                shape: shape.clone(),
                data: part.into(),
            })
            .collect();
        Ok(beside(&parts, dimension).data.to_vec())
    }
}

/// Bytes of an expert.
fn row_bytes(tensor: &Tensor<'_>) -> usize {
    tensor.data.len() / tensor.shape.first().copied().unwrap_or(1).max(1)
}

/// Some experts of each group of ranks at a time.
fn pieces(tensor: &Tensor<'_>, counts: &[usize]) -> Vec<(usize, Range<usize>)> {
    let rows = (PIECE / row_bytes(tensor).max(1)).max(1);
    let of = |(ep, count): (usize, &usize)| {
        let count = *count;
        let starts = (0..count).step_by(rows);
        starts.map(move |first| (ep, first..count.min(first + rows)))
    };
    counts.iter().enumerate().flat_map(of).collect()
}
