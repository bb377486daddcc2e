//! Every exchange on any number of threads.

use crate::support::{part, read, slice, unset};
use moesaic_collectives::schedules::{self, AddendRow, DedupMap, RowBytes, Schedule};
use moesaic_collectives::{
    Algorithm, Call, Collectives, CommElement, Communicator, Levels, NodeRank, NodeShape, Slice,
    Transfer, threads,
};
use moesaic_cpu::CpuDevice;
use moesaic_target::Device;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Returns 64 threads, or `MOESAIC_RANKS=4096`, as nodes of 8.
fn asked() -> NodeShape {
    let asked = std::env::var("MOESAIC_RANKS").ok();
    let ranks = asked.map_or(64, |ranks| ranks.parse().expect("a number of ranks"));
    NodeShape {
        nodes: ranks / 8,
        per_node: 8,
    }
}

#[test]
fn many_threads_exchange_in_two_dimensions() {
    let shape = asked();
    for algorithm in [
        Algorithm::Hierarchical(shape),
        Algorithm::InterFirst(shape),
        Algorithm::Concurrent(shape),
    ] {
        by(shape, algorithm);
    }
}

/// Pods of 16 nodes, or of 4.
#[test]
fn many_threads_exchange_in_levels() {
    let NodeShape { nodes, per_node } = asked();
    let pod = if nodes < 32 { 4 } else { 16 };
    let levels = Levels::new(&[nodes / pod, pod, per_node]).unwrap();
    by(asked(), Algorithm::Levels(levels));
}

#[test]
fn many_threads_send_tokens_once_to_a_node() {
    let shape = asked();
    let body = |world: &mut Communicator| tokens_once(world, shape);
    on_threads(shape.ranks(), "once", &body);
}

fn by(shape: NodeShape, algorithm: Algorithm) {
    let body = |world: &mut Communicator| equal_parts(world, algorithm);
    on_threads(shape.ranks(), &format!("{algorithm:?}"), &body);
}

/// Runs `body` on all ranks, where it must return true. Prints its time and the memory of the
/// process.
fn on_threads(ranks: usize, name: &str, body: &(dyn Fn(&mut Communicator) -> bool + Sync)) {
    let device: Arc<dyn Device> = Arc::new(CpuDevice::with_threads(1).unwrap());
    let start = Instant::now();
    let each = |mut world: Communicator| body(&mut world);
    let right = threads::run(ranks, |_| Ok(Arc::clone(&device)), each);
    assert!(right.unwrap().into_iter().all(|right| right.unwrap()));
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let most = status.lines().find(|line| line.starts_with("VmHWM"));
    let seconds = start.elapsed().as_secs_f64();
    println!("{ranks} threads, {name}: {seconds:.1} s, {most:?}");
}

fn patient() -> Call {
    Call::new("").within(Duration::from_secs(1800))
}

fn equal_parts(world: &mut Communicator, algorithm: Algorithm) -> bool {
    let device = Arc::clone(world.device());
    let (rank, ranks) = (world.rank(), world.size());
    let input: Vec<u8> = (0..ranks).flat_map(|q| part(rank, q, 3)).collect();
    let from = slice(&device, CommElement::U8, &input);
    let to = unset(&device, CommElement::U8, 3 * ranks);
    let begun = world.all_to_all(&from, &to, algorithm, &patient());
    begun.unwrap().wait().unwrap();
    let output = read(&device, &to);
    (0..ranks).all(|p| output[3 * p..3 * p + 3] == part(p, rank, 3))
}

const TOKENS: usize = 3;
const ROW: usize = 5;

/// Returns the tokens of `p` that go to `q`: each to a rank of its own node, and to several ranks
/// of two other nodes. Rank 1 has no tokens.
fn rows(shape: NodeShape, p: usize, q: usize) -> impl Iterator<Item = usize> {
    let NodeRank { node, place } = shape.split(p);
    let NodeRank {
        node: there,
        place: at,
    } = shape.split(q);
    let away = (there + shape.nodes - node) % shape.nodes;
    let places = (at + shape.per_node - place) % shape.per_node;
    let goes = move |t: &usize| match away {
        0 => places == *t,
        _ => (away == t + 1 || away == 5 * t + shape.nodes / 2) && [0, *t, 3].contains(&places),
    };
    (0..TOKENS).filter(move |t| p != 1 && goes(t))
}

/// Returns messages by rank, all in one buffer.
fn transfers(device: &Arc<dyn Device>, all: &[(usize, Vec<u8>)]) -> Vec<Transfer> {
    let bytes: Vec<u8> = all.iter().flat_map(|(_, data)| data).copied().collect();
    let whole = slice(device, CommElement::U8, &bytes);
    let mut at = 0;
    let transfer = |(peer, data): &(usize, Vec<u8>)| {
        let slice = Slice::new(whole.buffer(), CommElement::U8, at, data.len()).unwrap();
        at += data.len();
        Transfer { peer: *peer, slice }
    };
    all.iter().map(transfer).collect()
}

/// Returns the same messages with unset memory to receive into.
fn unset_messages(device: &Arc<dyn Device>, all: &[(usize, Vec<u8>)]) -> Vec<Transfer> {
    let empty = |(peer, data): &(usize, Vec<u8>)| (*peer, vec![0xAB; data.len()]);
    transfers(device, &all.iter().map(empty).collect::<Vec<_>>())
}

fn got(device: &Arc<dyn Device>, transfers: &[Transfer]) -> Vec<Vec<u8>> {
    let data = transfers.iter().map(|t| read(device, &t.slice));
    data.collect()
}

/// Dispatches rows of tokens, of which one crosses for each token and node, and returns them,
/// summed by nodes.
fn tokens_once(world: &mut Communicator, shape: NodeShape) -> bool {
    let device = Arc::clone(world.device());
    let (rank, ranks) = (world.rank(), world.size());
    let dedup = dedup(world, shape);
    let data = |p: usize, q: usize| -> Vec<u8> {
        rows(shape, p, q)
            .flat_map(|t| part(p, 17 * t, ROW))
            .collect()
    };
    let (from, to) = ends(ranks, &data, rank);
    let unset = unset_messages(&device, &to);
    let there = dedup.of_rows(RowBytes::same(ROW));
    exchange(world, &transfers(&device, &from), &unset, &there);
    let came = got(&device, &unset);
    let right = came.iter().eq(to.iter().map(|(_, data)| data));
    // Data that return belong to this rank's tokens.
    let answer = |q: usize, p: usize| -> Vec<u8> {
        rows(shape, p, q)
            .flat_map(|t| part(q, p + 19 * t, ROW))
            .collect()
    };
    let (from, to) = ends(ranks, &answer, rank);
    let unset = unset_messages(&device, &to);
    let back = dedup.summed(
        AddendRow {
            element: CommElement::U8,
            bytes: ROW,
        },
        &|_, _| true,
    );
    exchange(world, &transfers(&device, &from), &unset, &back);
    let answers: Vec<Vec<u8>> = to.iter().map(|(_, data)| data.clone()).collect();
    let peers: Vec<usize> = to.iter().map(|(peer, _)| *peer).collect();
    let sums = |answers| sums(shape, rank, &peers, answers);
    right && sums(&got(&device, &unset)) == sums(&answers)
}

fn exchange(world: &mut Communicator, from: &[Transfer], to: &[Transfer], by: &dyn Schedule) {
    let begun = world.exchange_with(from, to, by, &patient());
    begun.unwrap().wait().unwrap();
}

type Messages = Vec<(usize, Vec<u8>)>;

/// Returns what a rank sends and receives.
fn ends(ranks: usize, data: &dyn Fn(usize, usize) -> Vec<u8>, rank: usize) -> (Messages, Messages) {
    let some = |data: &dyn Fn(usize) -> Vec<u8>| -> Messages {
        let all = (0..ranks).map(|peer| (peer, data(peer)));
        all.filter(|(_, data)| !data.is_empty()).collect()
    };
    (some(&|q| data(rank, q)), some(&|p| data(p, rank)))
}

/// Returns the sums of nodes for each token.
fn sums(
    shape: NodeShape,
    rank: usize,
    peers: &[usize],
    answers: &[Vec<u8>],
) -> BTreeMap<(usize, usize), [u8; ROW]> {
    let mut sums = BTreeMap::new();
    for (q, data) in peers.iter().zip(answers) {
        for (t, row) in rows(shape, rank, *q).zip(data.chunks(ROW)) {
            let sum = sums.entry((t, shape.split(*q).node));
            let sum: &mut [u8; ROW] = sum.or_default();
            for (sum, own) in sum.iter_mut().zip(row) {
                *sum = sum.wrapping_add(*own);
            }
        }
    }
    sums
}

/// Exchanges the counts of rows and the numbers of those that share a token.
fn dedup(world: &mut Communicator, shape: NodeShape) -> Arc<DedupMap> {
    let device = Arc::clone(world.device());
    let (rank, ranks) = (world.rank(), world.size());
    let NodeRank { node: own, place } = shape.split(rank);
    let units: Vec<u64> = (0..ranks)
        .map(|q| rows(shape, rank, q).count() as u64)
        .collect();
    let hop_counts = world.exchange_counts(Algorithm::InterFirst(shape), 1, &units, &patient());
    let hop_counts = Arc::new(hop_counts.unwrap());
    let dedup_indices = |node: usize| {
        let places = (0..shape.per_node).map(|place| shape.rank(node, place));
        let tokens = places.flat_map(|q| rows(shape, rank, q));
        schedules::dedup_indices(tokens.map(|token| token as u32))
    };
    let sent: Vec<Vec<u32>> = (0..shape.nodes).map(dedup_indices).collect();
    let others = |sizes: &dyn Fn(usize) -> Vec<u8>| -> Messages {
        let others = (0..shape.nodes).filter(|node| *node != own);
        let all = others.map(|node| (shape.rank(node, place), sizes(node)));
        all.filter(|(_, data)| !data.is_empty()).collect()
    };
    let numbers = |node: usize| sent[node].iter().flat_map(|n| n.to_le_bytes()).collect();
    let numbers_from =
        |node: usize| vec![0xAB; 4 * DedupMap::rows_through(&hop_counts, shape, node)];
    let (from, unset) = (
        others(&numbers),
        unset_messages(&device, &others(&numbers_from)),
    );
    let begun = world.exchange(&transfers(&device, &from), &unset, &patient());
    begun.unwrap().wait().unwrap();
    let mut passed = vec![Vec::new(); shape.nodes];
    for (transfer, bytes) in unset.iter().zip(got(&device, &unset)) {
        let numbers = bytes.as_chunks::<4>().0.iter();
        passed[shape.split(transfer.peer).node] = numbers.map(|n| u32::from_le_bytes(*n)).collect();
    }
    Arc::new(DedupMap::new(shape, rank, hop_counts, sent, passed).expect("numbers as exchanged"))
}
