//! Gates that look at ranks. They decide from the logits of tokens, outside of a layer, and a layer
//! whose router is `external` takes the decision.
//!
//! | FastMoE | here |
//! |---|---|
//! | swipe gate | [`swipe`] in training, [`best`] in evaluation |
//! | faster gate | [`near`], with the experts of [`experts_near`]; its loss is [`balance`] |
//!
//! Hand a decision to a layer with [`Chosen::give`]. The layer's backward returns
//! `grad.topk_weights`, and [`Chosen::gradient`] turns that into the gradient of the logits. From
//! there on it is yours: the logits may be a projection of the tokens or anything else in your
//! model.
//!
//! ```
//! # mod moesaic { pub use moesaic_train as train; }
//! use moesaic::train::gates::best;
//!
//! let chosen = best(&[0.0, 2.0, 1.0], 3, 2)?;
//! assert_eq!(chosen.ids, [1, 2]);
//! let dlogits = chosen.gradient(&[1.0, 0.0])?;
//! assert!(dlogits[0] == 0.0 && dlogits[1] > 0.0 && dlogits[2] < 0.0);
//! # Ok::<(), moesaic::train::TrainError>(())
//! ```

use crate::TrainError;
use moesaic_engine::{Input, Mesh, ProcessGroup, Ranks};
use moesaic_plan::{Placement, RankCoords};
use moesaic_tensor::Tensor;
use std::cmp::Ordering;

/// The experts of each token. Their weights are the softmax over the logits of these experts alone:
/// with `top_k = 1` each weight is 1, and no logit has a gradient.
#[derive(Clone, Debug, PartialEq)]
pub struct Chosen {
    /// `[T, K]`.
    pub ids: Vec<i32>,
    /// `[T, K]`.
    pub weights: Vec<f32>,
    experts: usize,
    top_k: usize,
}

impl Chosen {
    fn new(logits: &[f32], experts: usize, top_k: usize, ids: Vec<i32>) -> Chosen {
        let rows = logits.chunks_exact(experts).zip(ids.chunks_exact(top_k));
        let weights = rows.flat_map(|(row, ids)| softmax(ids.iter().map(|&id| row[id as usize])));
        Chosen {
            weights: weights.collect(),
            ids,
            experts,
            top_k,
        }
    }

    /// Writes the decision into the input of a layer with an external router.
    pub fn give<'c>(&'c self, input: &mut Input<'c>) {
        let shape = [self.ids.len() / self.top_k, self.top_k];
        input.insert("topk_ids", Tensor::new(&shape, &self.ids));
        input.insert("topk_weights", Tensor::new(&shape, &self.weights));
    }

    /// Returns the gradient of the logits `[T, E]` from that of the weights `[T, K]`.
    ///
    /// # Errors
    /// [`TrainError::Tensor`] if the number of weights is wrong.
    pub fn gradient(&self, dweights: &[f32]) -> Result<Vec<f32>, TrainError> {
        if dweights.len() != self.weights.len() {
            let (found, wanted) = (dweights.len(), self.weights.len());
            let problem = format!("has {found} elements, the decision has {wanted} weights");
            return Err(TrainError::tensor("grad.topk_weights", problem));
        }
        let mut dlogits = vec![0.0; self.ids.len() / self.top_k * self.experts];
        let rows = dlogits.chunks_exact_mut(self.experts);
        let slots = self.ids.chunks_exact(self.top_k);
        let weights = self.weights.chunks_exact(self.top_k);
        let dweights = dweights.chunks_exact(self.top_k);
        for (((row, ids), weights), dweights) in rows.zip(slots).zip(weights).zip(dweights) {
            // The gradient of a softmax: each weight times its deviation from the weighted mean.
            let mean: f32 = weights.iter().zip(dweights).map(|(w, dw)| w * dw).sum();
            for ((&id, w), dw) in ids.iter().zip(weights).zip(dweights) {
                row[id as usize] += w * (dw - mean); // an expert may be there twice
            }
        }
        Ok(dlogits)
    }
}

/// Returns the best `top_k` of `experts` for each row of `logits [T, E]`. Ties go to the lower
/// expert, NaN comes last.
///
/// # Errors
/// [`TrainError::Tensor`] for sizes that do not fit.
pub fn best(logits: &[f32], experts: usize, top_k: usize) -> Result<Chosen, TrainError> {
    check(logits, experts, top_k)?;
    let ids = of_each(logits, experts, top_k, |_| true);
    Ok(Chosen::new(logits, experts, top_k, ids))
}

/// Chooses as [`best`] does, except that no rank receives more rows from its group than it has
/// itself: tokens times `top_k`. Slot by slot, a rank accepts rows from the others in rank order
/// while it has room. Refused rows move to ranks with room left, lowest first; the first tokens of
/// each rank keep their places. A moved row gets the new rank's expert number `slot`, counted from
/// that rank's first, so a token may have an expert twice. Every rank of the group calls this; it
/// takes one exchange.
///
/// With expert tensor parallelism, the ranks that share experts count as one, with their room added
/// up.
///
/// # Errors
/// The errors of [`best`] and of the exchange, or [`TrainError::Tensor`] if experts have replicas.
///
/// ```
/// # mod moesaic {
/// #     pub use moesaic_engine::{RngKey, Input, Layer};
/// #     pub use {moesaic_tensor::Tensor, moesaic_train as train};
/// # }
/// use moesaic::train::{TrainError, gates::swipe};
/// use moesaic::{Input, Layer, RngKey, Tensor};
///
/// /// `y`, and the gradient of the logits `[T, E]`, of a layer with an external router.
/// fn step(
///     layer: &Layer,
///     (x, logits): (&[f32], &[f32]),
///     dy: &Tensor,
/// ) -> Result<Vec<f32>, TrainError> {
///     let shape = &layer.spec().shape;
///     let chosen = swipe(&layer.ranks()?, logits, shape.experts, shape.top_k)?;
///     let mut input = Input::new(x.len() / shape.model_dim, x);
///     chosen.give(&mut input);
///     let (_, saved) = layer.forward_train(input.reading(&["y"]), RngKey::default())?;
///     let back = layer.backward(&saved, dy, false)?;
///     let weights = back.get("grad.topk_weights").map(Tensor::to_f32);
///     chosen.gradient(&weights.unwrap_or_default())
/// }
/// ```
pub fn swipe(
    ranks: &Ranks,
    logits: &[f32],
    experts: usize,
    top_k: usize,
) -> Result<Chosen, TrainError> {
    check(logits, experts, top_k)?;
    let (mesh, placement) = (ranks.mesh().parallel(), placed(ranks.mesh(), experts)?);
    if let Some(expert) = placement.replicated().first() {
        let problem = format!("choose expert {expert}, which several ranks have: room is unknown");
        return Err(TrainError::tensor("logits", problem));
    }
    let mut ids = of_each(logits, experts, top_k, |_| true);
    let owners: Vec<usize> = (0..experts).map(|expert| placement.owner(expert)).collect();
    // One exchange carries everything: this rank's room, then for each slot the rows it wants to
    // send to each expert-parallel rank.
    let mut told = vec![0u64; 1 + top_k * mesh.ep];
    told[0] = ids.len() as u64;
    for (slot, &id) in ids.iter().enumerate() {
        told[1 + slot % top_k * mesh.ep + owners[id as usize]] += 1;
    }
    let bytes: Vec<u8> = told.iter().flat_map(|n| n.to_le_bytes()).collect();
    let all = ranks.gather_bytes(&bytes, ProcessGroup::Ep, "rows that ranks want to send")?;
    let all: Vec<Vec<u64>> = all.iter().map(|bytes| numbers(bytes)).collect();
    // Ranks with another top_k would read each other's numbers wrongly.
    if all.iter().any(|theirs| theirs.len() != told.len()) {
        let problem = format!("is for {top_k} experts a token here, and not so on all ranks");
        return Err(TrainError::tensor("logits", problem));
    }
    let of = |ep: usize| &all[ep * mesh.expert_tp..(ep + 1) * mesh.expert_tp];
    let room = |ep| of(ep).iter().map(|theirs| theirs[0]).sum();
    let mut room: Vec<u64> = (0..mesh.ep).map(room).collect();
    let RankCoords { ep, tp: shard, .. } = ranks.mesh().place();
    // From here on each rank computes the moves of all, so that no second exchange is needed.
    let own = ep * mesh.expert_tp + shard;
    for slot in 0..top_k {
        let first = 1 + slot * mesh.ep;
        let wants = all.iter().map(|theirs| &theirs[first..first + mesh.ep]);
        let sends = moved(&wants.collect::<Vec<_>>(), &mut room);
        let to = |ep: usize| {
            let theirs = placement.of(ep);
            theirs[slot % theirs.len()]
        };
        let slots = ids.iter_mut().skip(slot).step_by(top_k);
        resend(slots, sends[own].clone(), &owners, to);
    }
    Ok(Chosen::new(logits, experts, top_k, ids))
}

/// Chooses the best two of `experts`, while at most the share `outgoing` of the tokens gets an
/// expert that is not near (`here[e]` is false). If more tokens want a far expert first, those with
/// the highest logits get it, as their second expert, and all others get their best near ones. If
/// fewer do, the result equals [`best`], far second experts included.
///
/// # Errors
/// [`TrainError::Tensor`] for sizes that do not fit, a share outside of 0 to 1, or fewer than two
/// near experts.
///
/// ```
/// # mod moesaic { pub use moesaic_train as train; }
/// use moesaic::train::gates::near;
///
/// let here = [true, true, false];
/// let logits = [0.1, 0.2, 0.9, 0.3, 0.1, 0.5]; // both tokens want the last expert
/// let chosen = near(&logits, &here, 0.5)?;
/// assert_eq!(chosen.ids, [1, 2, 0, 1]); // one of them gets it, as its second
/// # Ok::<(), moesaic::train::TrainError>(())
/// ```
pub fn near(logits: &[f32], here: &[bool], outgoing: f64) -> Result<Chosen, TrainError> {
    let experts = here.len();
    check(logits, experts, 2)?;
    let close = here.iter().filter(|here| **here).count();
    if close < 2 || !(0.0..=1.0).contains(&outgoing) {
        let problem = format!(
            "cannot be decided with {close} experts near and a share of {outgoing}: there have \
             to be two, and the share is of 0 to 1"
        );
        return Err(TrainError::tensor("logits", problem));
    }
    let free = of_each(logits, experts, 2, |_| true);
    let first = |token: usize| free[2 * token] as usize;
    let tokens = logits.len() / experts;
    // The cast rounds down, so the share is never exceeded.
    let most = (tokens as f64 * outgoing) as usize;
    let mut far: Vec<usize> = (0..tokens).filter(|&token| !here[first(token)]).collect();
    if far.len() < most {
        return Ok(Chosen::new(logits, experts, 2, free));
    }
    let logit = |token: usize| logits[token * experts + first(token)];
    far.sort_by(|&a, &b| before((logit(a), a), (logit(b), b)));
    // Everybody gets near experts first; then the tokens with the strongest wish get their far one
    // back.
    let mut ids = of_each(logits, experts, 2, |expert| here[expert]);
    for &token in &far[..most] {
        ids[2 * token + 1] = free[2 * token];
    }
    Ok(Chosen::new(logits, experts, 2, ids))
}

/// Returns true for each expert all of whose shards are on ranks of this rank's node, as input for
/// [`near`]. A node is `per_node` consecutive ranks.
pub fn experts_near(mesh: &Mesh, per_node: usize, experts: usize) -> Vec<bool> {
    let (parallel, place) = (mesh.parallel(), mesh.place());
    let node = |rank: usize| rank / per_node.max(1);
    let near = |ep: usize| {
        let rank = |shard| {
            parallel.rank(RankCoords {
                ep,
                tp: shard,
                ..place
            })
        };
        (0..parallel.expert_tp).all(|shard| node(rank(shard)) == node(mesh.rank()))
    };
    let placement = mesh.placement_of(experts);
    let here = |expert| match &placement {
        Some(placement) => placement.holders(expert).iter().any(|&ep| near(ep)),
        None => false,
    };
    (0..experts).map(here).collect()
}

/// Returns `E · Σ_e c_e m_e` and its gradient `[T, E]`. `c_e` is the share of tokens whose best
/// expert is e, and `m_e` the mean of the softmax over all experts. Without tokens it is zero. In
/// place of the first E, FastMoE has the square of a rank's experts over all.
///
/// # Errors
/// [`TrainError::Tensor`] for sizes that do not fit.
///
/// ```
/// # mod moesaic { pub use moesaic_train as train; }
/// let (loss, gradient) = moesaic::train::gates::balance(&[0.0; 8], 4)?;
/// assert_eq!((loss, gradient.len()), (1.0, 8)); // ties go to the first, scores are equal
/// # Ok::<(), moesaic::train::TrainError>(())
/// ```
pub fn balance(logits: &[f32], experts: usize) -> Result<(f32, Vec<f32>), TrainError> {
    check(logits, experts, 1)?;
    let tokens = (logits.len() / experts).max(1) as f32;
    let mut share = vec![0.0; experts];
    for id in of_each(logits, experts, 1, |_| true) {
        share[id as usize] += 1.0 / tokens;
    }
    // Only the mean of the softmax has a gradient; the shares of best experts are constant.
    let (mut loss, mut gradient) = (0.0, Vec::with_capacity(logits.len()));
    let scale = experts as f32 / tokens;
    for row in logits.chunks_exact(experts) {
        let scores = softmax(row.iter().copied());
        let sum: f32 = scores.iter().zip(&share).map(|(p, c)| p * c).sum();
        loss += scale * sum;
        gradient.extend(
            scores
                .iter()
                .zip(&share)
                .map(|(p, c)| scale * p * (c - sum)),
        );
    }
    Ok((loss, gradient))
}

fn check(logits: &[f32], experts: usize, top_k: usize) -> Result<(), TrainError> {
    let problem = match logits.len() {
        _ if !(1..=experts).contains(&top_k) => {
            format!("cannot give {top_k} of {experts} experts: 1 to {experts} can be chosen")
        }
        found if !found.is_multiple_of(experts) => {
            format!("has {found} elements, which are no rows of {experts} experts")
        }
        _ => return Ok(()),
    };
    Err(TrainError::tensor("logits", problem))
}

/// Returns the best of the allowed experts for each row.
fn of_each(
    logits: &[f32],
    experts: usize,
    top_k: usize,
    allowed: impl Fn(usize) -> bool,
) -> Vec<i32> {
    let candidates: Vec<usize> = (0..experts).filter(|&expert| allowed(expert)).collect();
    let best = |row: &[f32]| {
        let mut order = candidates.clone();
        order.sort_unstable_by(|&a, &b| before((row[a], a), (row[b], b)));
        order.truncate(top_k);
        order.into_iter().map(|expert| expert as i32)
    };
    logits.chunks_exact(experts).flat_map(best).collect()
}

/// Orders higher values first, then lower numbers; NaN comes last.
fn before(a: (f32, usize), b: (f32, usize)) -> Ordering {
    let values = b.0.partial_cmp(&a.0);
    // One of both is NaN: the other goes first.
    let values = values.unwrap_or_else(|| a.0.is_nan().cmp(&b.0.is_nan()));
    values.then(a.1.cmp(&b.1))
}

fn softmax(values: impl Iterator<Item = f32> + Clone) -> Vec<f32> {
    // Subtracting the largest keeps the exponentials from overflowing.
    let most = values.clone().fold(f32::NEG_INFINITY, f32::max);
    let scores: Vec<f32> = values.map(|value| (value - most).exp()).collect();
    let sum: f32 = scores.iter().sum();
    scores.iter().map(|score| score / sum).collect()
}

/// Returns the ranks of each expert.
fn placed(mesh: &Mesh, experts: usize) -> Result<Placement, TrainError> {
    mesh.placement_of(experts).ok_or_else(|| {
        let ep = mesh.parallel().ep;
        let problem = format!("are of {experts} experts, which {ep} groups do not have so");
        TrainError::tensor("logits", problem)
    })
}

fn numbers(bytes: &[u8]) -> Vec<u64> {
    let each = bytes.as_chunks().0.iter();
    each.map(|&number| u64::from_le_bytes(number)).collect()
}

/// Returns the number of rows that each source sends to each destination, with no destination over
/// its room. Refused rows go where room is left. `wants` is indexed by source, then by destination.
fn moved(wants: &[&[u64]], room: &mut [u64]) -> Vec<Vec<u64>> {
    let mut sends: Vec<Vec<u64>> = wants.iter().map(|wants| wants.to_vec()).collect();
    let mut refused = vec![0; wants.len()];
    for (to, room) in room.iter_mut().enumerate() {
        for (sends, refused) in sends.iter_mut().zip(&mut refused) {
            let taken = sends[to].min(*room);
            *refused += sends[to] - taken;
            *room -= taken;
            sends[to] = taken;
        }
    }
    // Refused rows go to the lowest rank with room, in the order of their sources.
    let mut to = 0;
    for (sends, refused) in sends.iter_mut().zip(&mut refused) {
        while *refused > 0 && to < room.len() {
            let taken = room[to].min(*refused);
            sends[to] += taken;
            room[to] -= taken;
            *refused -= taken;
            // A full rank stays full, so the next source starts behind it.
            to += usize::from(room[to] == 0);
        }
    }
    sends
}

/// Assigns the ids of a slot to ranks as often as `sends` says; the first tokens keep their places.
fn resend<'i>(
    ids: impl Iterator<Item = &'i mut i32>,
    mut sends: Vec<u64>,
    owners: &[usize],
    to: impl Fn(usize) -> usize,
) {
    let mut elsewhere = Vec::new();
    for id in ids {
        match &mut sends[owners[*id as usize]] {
            // The first tokens have used up this rank's quota and keep their places.
            0 => elsewhere.push(id),
            left => *left -= 1,
        }
    }
    let places = sends.iter().enumerate();
    let places = places.flat_map(|(ep, &left)| (0..left).map(move |_| ep));
    for (id, ep) in elsewhere.into_iter().zip(places) {
        *id = to(ep) as i32;
    }
}
