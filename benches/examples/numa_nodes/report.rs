//! Makes layers, runs them and prints the observations.

use crate::Args;
use crate::pages::{self, Node, Range};
use crate::watch::{self, PART};
use moesaic::cpu::host_nodes;
use moesaic::half::bf16;
use moesaic::plan::{TensorPlan, TensorRole};
use moesaic::{DType, Engine, EngineOptions, Input, Layer, LayerSpec, Tensor, Tensors};
use std::error::Error;

const LAYER: &str = include_str!("layer.toml");

pub fn run(args: &Args) -> Result<(), Box<dyn Error>> {
    let options = EngineOptions {
        pinned: args.pin,
        strict: args.strict,
        ..EngineOptions::default()
    };
    let engine = Engine::open(&args.target, options)?;
    if args.pin {
        // The engine's threads have been placed; this thread calls it.
        pages::stay()?;
    }
    println!("{} · {}", engine.device_info().name, engine.target());
    println!(
        "{} NUMA nodes, processors of {}",
        host_nodes().count(),
        pages::machine().join(", ")
    );
    if host_nodes().count() == 1 {
        println!("one node: every page is near every processor, and there is nothing to choose");
    }
    for dtype in [DType::F32, DType::Bf16] {
        layer(&engine, dtype)?;
    }
    println!(
        "\nthreads and their processors: {}",
        pages::threads().join(", ")
    );
    Ok(())
}

/// Reports on one layer: where its packed weights lie, and which node reads them.
fn layer(engine: &Engine, dtype: DType) -> Result<(), Box<dyn Error>> {
    let mut spec = LayerSpec::from_toml(LAYER)?;
    spec.precision.weights = dtype;
    spec.precision.activations = dtype;
    let tilings = engine.tilings(&spec, None)?;
    let weights = weights(&tilings.first().tensors);
    let layer = engine.layer(&spec, &weights)?;
    drop(weights);

    println!(
        "\n{dtype}; a digit is the node of 2 MB, where they lie and of the thread that reads them first"
    );
    for tensor in layer
        .plan()
        .tensors
        .iter()
        .filter(|t| t.role == TensorRole::Packed)
    {
        let range = held(&layer, tensor)?;
        println!(
            "  {}, {} MB, {}",
            tensor.name,
            range.bytes / 1_000_000,
            lies(range)?
        );
        println!("    lies         {}", digits(&parts(range)?));
        for tokens in [1, 8, 512] {
            println!("    {}", read(&layer, range, tokens)?);
        }
    }
    Ok(())
}

/// Returns the memory range of a packed tensor.
fn held(layer: &Layer, tensor: &TensorPlan) -> Result<Range, Box<dyn Error>> {
    let missing = || format!("the layer does not hold {}", tensor.name);
    Ok(Range {
        start: layer.weight_ptr(&tensor.name).ok_or_else(missing)?.0 as usize,
        bytes: usize::try_from(tensor.bytes(0))?,
    })
}

fn nodes(range: Range) -> Result<Vec<Node>, String> {
    pages::nodes(range).map_err(|error| format!("the system does not say where pages lie: {error}"))
}

/// Describes how many pages lie on each node.
fn lies(range: Range) -> Result<String, Box<dyn Error>> {
    let counts = pages::count(&nodes(range)?).into_iter();
    let counts = counts.map(|(node, n)| match node {
        0.. => format!("node{node}: {n}"),
        _ => format!("no node (error {}): {n}", -node),
    });
    let counts: Vec<String> = counts.collect();
    Ok(format!("pages on {}", counts.join(", ")))
}

/// Returns the node of each whole part that can be watched, if all its pages are on one node.
fn parts(range: Range) -> Result<Vec<Option<Node>>, Box<dyn Error>> {
    let nodes = nodes(range)?;
    let parts = nodes.chunks_exact(PART / pages::page_size());
    let one = |part: &[Node]| part.iter().all(|node| *node == part[0]).then_some(part[0]);
    Ok(parts.map(one).collect())
}

fn digits(nodes: &[Option<Node>]) -> String {
    let digit = |node: Node| char::from_digit(u32::try_from(node).ok()?, 36);
    let digits = nodes.iter().map(|node| node.and_then(digit).unwrap_or('.'));
    digits.collect()
}

/// Describes which nodes read the parts in one pass, and the share of parts read by the node that
/// holds them.
fn read(layer: &Layer, range: Range, tokens: usize) -> Result<String, Box<dyn Error>> {
    let dtype = layer.plan().spec.precision.activations;
    let dim = layer.plan().spec.shape.model_dim;
    let mut input = Input {
        tokens,
        ..Input::default()
    };
    input.insert("x", numbers(dtype, &[tokens, dim], 1.0));
    let mut y = 0;
    let readers = watch::readers(range, || -> Result<(), Box<dyn Error>> {
        y = digest(&layer.forward(&input)?.y().data);
        Ok(())
    })?;
    let lie = parts(range)?;
    let both = lie
        .iter()
        .zip(&readers)
        .filter(|(_, reader)| reader.is_some());
    let (near, all) = both.fold((0, 0), |(near, all), (lies, reader)| {
        (near + usize::from(lies == reader), all + 1)
    });
    let digits = digits(&readers);
    Ok(format!(
        "{tokens:3} tokens   {digits}  {near} of {all} near, y {y:016x}"
    ))
}

/// Returns weights in the tensors' shapes, small enough that outputs are of the order of one.
fn weights(tensors: &[TensorPlan]) -> Tensors<'static> {
    let mut weights = Tensors::new();
    for tensor in tensors.iter().filter(|t| t.role == TensorRole::Weight) {
        let sizes = tensor.shape.iter().map(|size| size.eval(0) as usize);
        let shape: Vec<usize> = sizes.collect();
        weights.insert(&tensor.name, numbers(tensor.dtype, &shape, 0.05));
    }
    weights
}

/// Returns numbers between -`most` and `most` that look random and are always the same.
fn numbers(dtype: DType, shape: &[usize], most: f32) -> Tensor<'static> {
    let one = |i: usize| {
        let mixed = (i as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        let mixed = (mixed ^ (mixed >> 29)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        ((mixed >> 40) as f32 / (1 << 23) as f32 - 1.0) * most
    };
    let all = 0..shape.iter().product();
    match dtype {
        DType::Bf16 => Tensor::owned(shape, all.map(|i| bf16::from_f32(one(i))).collect()),
        _ => Tensor::owned(shape, all.map(one).collect()),
    }
}

/// Returns an FNV-1a digest, so that different bytes are very likely to show.
fn digest(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xCBF2_9CE4_8422_2325, |hash, &byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01B3)
    })
}
