//! Whole layers of known models, compared with other implementations on the
//! same weights and inputs, in pairs: ours, theirs, ours, theirs.
//!
//! ```sh
//! cargo bench -p moesaic-benches --bench layer -- --python ~/peers/bin/python
//! cargo bench -p moesaic-benches --bench layer -- --shape qwen3 --tokens 1,8 --dtype bf16 --threads 2 --peers torch,gemm --backward
//! cargo bench -p moesaic-benches --bench layer -- --shape qwen3 --tokens 4096 --skew uniform --threads 1,2 --products
//! ```
//!
//! `--help` lists the options; benches/peers/README.md says who the peers are
//! and what is compared.

#[path = "layer/answer.rs"]
mod answer;
#[path = "layer/compare.rs"]
mod compare;
#[allow(dead_code, reason = "the GPU smoke test uses the rest")]
#[path = "layer/data.rs"]
mod data;
#[path = "layer/gauge.rs"]
mod gauge;
#[path = "layer/gradient.rs"]
mod gradient;
#[path = "layer/here.rs"]
mod here;
#[path = "layer/pass.rs"]
mod pass;
#[path = "layer/peer.rs"]
mod peer;
#[path = "layer/products.rs"]
mod products;
#[path = "layer/select.rs"]
mod select;
#[path = "layer/shapes.rs"]
mod shapes;
#[path = "layer/started.rs"]
mod started;
#[path = "layer/table.rs"]
mod table;
#[path = "layer/timing.rs"]
mod timing;
#[path = "layer/work.rs"]
mod work;

use data::{Call, Folder};
use gauge::Gauge;
use here::Here;
use moesaic::DType;
use peer::{Peer, Variant};
use select::Selection;
use shapes::Shape;
use std::error::Error;
use table::Table;
use work::Work;

/// Seed of the draw of experts.
const SEED: u64 = 5;

type Result<T = ()> = std::result::Result<T, Box<dyn Error>>;

fn main() -> Result {
    let Some(selection) = Selection::parse(std::env::args().skip(1))? else {
        return Ok(());
    };
    println!("# {}", table::machine());
    println!(
        "# cargo bench -p moesaic-benches --bench layer -- {}",
        selection.command
    );
    if selection.products {
        println!("{}", products::LEGEND)
    } else {
        println!("{}", table::LEGEND)
    }
    for &threads in &selection.threads {
        let mut peers = if selection.products {
            Vec::new()
        } else {
            started::all(&selection, threads)
        };
        for &dtype in &selection.dtypes {
            for shape in &selection.shapes {
                if selection.products {
                    products::report(&selection, threads, dtype, shape)?
                } else {
                    layer(&selection, &mut peers, threads, dtype, shape)?
                }
                println!();
            }
        }
    }
    Ok(())
}

/// Prints one table: a layer in one type on a number of threads.
fn layer(
    selection: &Selection,
    peers: &mut [Peer],
    threads: usize,
    dtype: DType,
    shape: &Shape,
) -> Result {
    let folder = Folder::new()?;
    let spec = shape.spec(dtype);
    let weights = data::weights(&spec, dtype);
    data::write_layer(folder.path(), shape, dtype, &weights)?;
    let here = Here::new(&spec, &weights, threads, selection.pass)?;
    let router = data::router_rows(&weights);
    drop(weights);
    let mut variants: Vec<Variant> = Vec::new();
    for (index, peer) in peers.iter_mut().enumerate() {
        variants.extend(peer.load(index, folder.path(), selection.pass));
    }
    variants.retain(|variant| !selection.without.contains(&variant.title));
    let product = timing::torch_product(dtype, peers);
    table::head(shape, dtype, threads, product);
    let gauge = Gauge::new(threads, dtype)?;
    let table = Table::new(&variants);
    table.titles();
    for skew in &selection.skews {
        for &tokens in &selection.tokens {
            let ids = skew.draw(shape.experts, shape.top_k, tokens, SEED);
            let call = Call::new(shape, dtype, tokens, &ids, &router);
            let work = Work::of(shape, dtype, tokens, &ids, selection.pass);
            let input = folder.input(&call, dtype, shape)?;
            let run = here.start(&call, &ids)?;
            let equal = compare::all(&run, peers, &variants, &input, &folder, selection.pass)?;
            let times = timing::pairs(&run, &work, &gauge, peers, &variants, &equal, selection)?;
            table.row(*skew, tokens, selection.pass, &work, &times);
        }
    }
    Ok(())
}
