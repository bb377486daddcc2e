//! `moesaic doctor --ranks`: the ranks, and the speed of the links between them.

use crate::console::Console;
use crate::failure::{Failure, Result};
use crate::palette::Palette;
use crate::table::Table;
use crate::units;
use moesaic::collectives::measure::{MeasureOptions, MeasuredLinks, PairLink, measure};
use moesaic::collectives::{
    Call, CollectiveError, Collectives, Communicator, Topology, World, mpi, nccl, threads, topology,
};
use moesaic::cpu::CpuDevice;
use moesaic::target::{Device, DeviceError};
use moesaic::toolchain::{self, Registry};
use serde_json::{Value, json};
use std::sync::Arc;

/// One rank's description of itself. On a healthy job only the host differs between ranks.
struct Rank {
    host: String,
    /// Versions of moesaic and of each library that carries messages, as (name, version).
    versions: Vec<(String, String)>,
    /// The path of each library.
    places: Vec<(String, String)>,
}

/// Rates that a link should reach, in bytes per second; 0 expects nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ExpectedRates {
    /// The rate between ranks of one node.
    node: f64,
    /// The rate between ranks of two nodes.
    network: f64,
}

impl ExpectedRates {
    /// Converts rates in GB/s, of a node and of the network.
    pub fn new(rates: Option<&[f64]>) -> Result<ExpectedRates> {
        let fits = |rate: &f64| rate.is_finite() && *rate >= 0.0;
        match rates {
            None => Ok(ExpectedRates::default()),
            Some([node, network]) if fits(node) && fits(network) => Ok(ExpectedRates {
                node: node * 1e9,
                network: network * 1e9,
            }),
            Some(_) => Err(Failure::input("--expect takes two rates in GB/s").hint(
                "--expect 5,40: between ranks of a node, and of two nodes; 0 expects nothing",
            )),
        }
    }
}

/// A link slower than this fraction of the expected rate is too slow.
const ENOUGH: f64 = 0.5;
/// A link slower than this fraction of the median of its kind is too slow. It is lower than
/// [`ENOUGH`] because nobody has said that the links are alike.
const ALIKE: f64 = 0.25;

/// The report that rank 0 prints.
struct Report {
    expected: ExpectedRates,
    carrier: String,
    ranks: Vec<Rank>,
    topology: Topology,
    measured: MeasuredLinks,
}

/// Measures the links between `ranks` threads of this process, or between the launcher's processes
/// for 0.
pub fn execute(ranks: u16, expected: ExpectedRates, json: bool, console: &Console) -> Result {
    let report = match ranks {
        0 => processes()?,
        ranks => of_threads(usize::from(ranks))?,
    };
    let Some(report) = report else { return Ok(()) };
    let report = Report { expected, ..report };
    if json {
        console.json(&report.json())?;
    } else {
        console.report(&report.text(&console.out))?;
    }
    report.verdict()
}

fn device() -> std::result::Result<Arc<dyn Device>, DeviceError> {
    Ok(Arc::new(CpuDevice::with_threads(1)?))
}

fn processes() -> Result<Option<Report>> {
    if World::from_environment().map_err(Failure::input)?.is_none() {
        return Err(Failure::input(
            "`--ranks` without a number is for a program that a launcher starts",
        )
        .hint(
            "moesaic launch -n 4 -- moesaic doctor --ranks; mpirun and srun do the same; \
                     `--ranks 4` takes threads of this process",
        ));
    }
    let registry = Registry::open()?;
    let installed = toolchain::mpi(&registry).map(|found| found.library);
    let options = mpi::MpiOptions {
        installed,
        ..mpi::MpiOptions::default()
    };
    let world = mpi::start(&options, device().map_err(|e| Failure::from(&e))?);
    let world = world.map_err(Failure::input)?;
    look(world, &engines(&options)).map_err(Failure::work)
}

fn of_threads(ranks: usize) -> Result<Option<Report>> {
    let results = threads::run(ranks, |_| device(), |world| look(world, &[]));
    let mut report = None;
    for result in results.map_err(Failure::work)? {
        let own = result.map_err(|_| Failure::work("a rank has panicked"))?;
        report = report.or(own.map_err(Failure::work)?);
    }
    Ok(report)
}

/// A library that carries messages, as (name, version, path).
type Engine = (&'static str, String, String);

/// Lists every library that is found.
fn engines(options: &mpi::MpiOptions) -> Vec<Engine> {
    let found = mpi::probe(options).ok();
    let mpi = found.map(|found| {
        let version = format!("{}, by {}", found.version, found.interface);
        ("MPI", version, found.library)
    });
    let of_gpus = [("NCCL", "cuda:sm_90"), ("RCCL", "rocm:gfx942")];
    let of_gpus = of_gpus.into_iter().filter_map(|(name, target)| {
        let found = nccl::probe(target.parse().ok()?, &nccl::NcclOptions::default()).ok()?;
        Some((name, found.version, found.library))
    });
    mpi.into_iter().chain(of_gpus).collect()
}

/// Gathers and measures on every rank. Rank 0 gets the report.
fn look(
    mut world: Communicator,
    engines: &[Engine],
) -> std::result::Result<Option<Report>, CollectiveError> {
    let call = Call::new("doctor");
    let carrier = world.transport();
    let all = world.gather_bytes(own(engines).to_string().as_bytes(), &call)?;
    let ranks: Vec<Rank> = all.iter().map(|bytes| Rank::read(bytes)).collect();
    let topology = Topology::gather(&mut world, &call)?;
    let device = Arc::clone(world.device());
    let measured = measure(&mut world, &device, &topology, &MeasureOptions::default())?;
    let first = world.rank() == 0;
    world.finish(&call)?;
    Ok(first.then_some(Report {
        expected: ExpectedRates::default(),
        carrier,
        ranks,
        topology,
        measured,
    }))
}

fn own(engines: &[Engine]) -> Value {
    let libraries = engines
        .iter()
        .map(|(name, version, place)| json!({ "name": name, "version": version, "place": place }));
    json!({
        "host": topology::host_name(),
        "version": env!("CARGO_PKG_VERSION"),
        "libraries": libraries.collect::<Vec<_>>(),
    })
}

impl Rank {
    fn read(bytes: &[u8]) -> Rank {
        let value: Value = serde_json::from_slice(bytes).unwrap_or_default();
        let text = |value: &Value| value.as_str().unwrap_or("?").to_string();
        let libraries = value["libraries"].as_array().cloned().unwrap_or_default();
        let moesaic = ("moesaic".to_string(), text(&value["version"]));
        let versions = libraries
            .iter()
            .map(|l| (text(&l["name"]), text(&l["version"])));
        Rank {
            host: text(&value["host"]),
            versions: std::iter::once(moesaic).chain(versions).collect(),
            places: libraries
                .iter()
                .map(|l| (text(&l["name"]), text(&l["place"])))
                .collect(),
        }
    }

    fn version(&self, name: &str) -> &str {
        let found = self.versions.iter().find(|(other, _)| other == name);
        found.map_or("none", |(_, version)| version)
    }
}

impl Report {
    /// Lists the versions in which another rank differs from rank 0, one line each.
    fn differences(&self) -> Vec<String> {
        let mut names: Vec<&String> = Vec::new();
        for (name, _) in self.ranks.iter().flat_map(|rank| &rank.versions) {
            if !names.contains(&name) {
                names.push(name);
            }
        }
        let first = &self.ranks[0];
        let differs = |name: &&String| {
            let mut others = self.ranks.iter().enumerate().skip(1);
            let (rank, other) = others.find(|(_, r)| r.version(name) != first.version(name))?;
            Some(format!(
                "{name} is {} on rank 0 and {} on rank {rank} ({})",
                first.version(name),
                other.version(name),
                other.host
            ))
        };
        names.iter().filter_map(differs).collect()
    }

    /// Lists links that are too slow, one line for each kind: compared with the expected rate, or
    /// with the median of the kind.
    fn slow(&self) -> Vec<String> {
        let line = |kind: &Kind| {
            let links = self.of_kind(kind);
            let (expected, median) = ((kind.expected)(&self.expected), median_rate(&links));
            let slow = slowest(&links, ENOUGH, ("expected", expected))
                .or_else(|| slowest(&links, ALIKE, ("the median", median)))?;
            Some(format!("{}: {slow}", kind.name))
        };
        KINDS.iter().filter_map(line).collect()
    }

    /// Returns whether a link is slower than [`ENOUGH`] of its expected rate.
    fn disappoints(&self) -> bool {
        KINDS.iter().any(|kind| {
            let expected = (kind.expected)(&self.expected);
            slowest(&self.of_kind(kind), ENOUGH, ("expected", expected)).is_some()
        })
    }

    /// Returns the failure that sets the exit code, if any.
    fn verdict(&self) -> Result {
        if !self.differences().is_empty() {
            return Err(Failure::work("ranks differ in what they run").hint(
                "install the same moesaic and the same libraries on every machine, and give every \
                 rank the same variables",
            ));
        }
        if self.disappoints() {
            return Err(Failure::work(
                "a link has less than half of what --expect says",
            )
            .hint(
                "the library may have fallen back to a slower network: see what carries the ranks \
                 above, which interfaces it was told to use (UCX_NET_DEVICES, \
                 OMPI_MCA_btl_tcp_if_include, FI_PROVIDER), and whether the slow pair shares a \
                 host with others",
            ));
        }
        Ok(())
    }

    fn of_kind(&self, kind: &Kind) -> Vec<&PairLink> {
        let links = self.measured.links.iter();
        links.filter(|l| l.same_node == kind.same_node).collect()
    }

    /// Returns the hosts in the order of ranks, with the number of ranks on each.
    fn hosts(&self) -> Vec<(&str, usize)> {
        let mut list: Vec<(&str, usize)> = Vec::new();
        for host in &self.topology.hosts {
            match list.iter_mut().find(|(name, _)| name == host) {
                Some((_, count)) => *count += 1,
                None => list.push((host, 1)),
            }
        }
        list
    }

    fn shape(&self) -> String {
        match self.topology.shape {
            Some(shape) => format!(
                "{} of {} each, in the order of ranks",
                units::count(shape.nodes, "node"),
                units::count(shape.per_node, "rank")
            ),
            None => "nodes have unequally many ranks, or ranks that are not in a row".to_string(),
        }
    }

    fn text(&self, palette: &Palette) -> String {
        let mut text = format!(
            "{} by {}: {}\n",
            palette.bold(&units::count(self.ranks.len(), "rank")),
            self.carrier,
            self.shape()
        );
        let hosts = self.hosts();
        for (host, count) in hosts.iter().take(SHOWN) {
            text += &format!("  {host}: {}\n", units::count(*count, "rank"));
        }
        if hosts.len() > SHOWN {
            text += &format!("  and {} more\n", units::count(hosts.len() - SHOWN, "host"));
        }
        for (name, version) in &self.ranks[0].versions {
            let place = self.ranks[0].places.iter().find(|(other, _)| other == name);
            let place = place.map_or(String::new(), |(_, place)| format!(" ({place})"));
            text += &format!("  {name} {version}{place}\n");
        }
        for line in self.differences() {
            text += &format!("  {} {line}\n", palette.yellow("differs:"));
        }
        text += &format!("\n{}", self.table().render(palette));
        for line in self.slow() {
            text += &format!("  {} {line}\n", palette.yellow("slow:"));
        }
        text
    }

    fn table(&self) -> Table {
        let titles = [
            "BETWEEN",
            ">COUNT",
            ">LATENCY",
            ">WORST",
            ">BANDWIDTH",
            ">WORST",
            "SLOWEST",
        ];
        let mut table = Table::new(&titles);
        for kind in &KINDS {
            let links = self.of_kind(kind);
            if !links.is_empty() {
                table.row(row(kind.name, &links));
            }
        }
        for all in &self.measured.all_to_all {
            table.row([
                format!("all, {} per pair", units::bytes(all.bytes_per_pair as u64)),
                self.ranks.len().to_string(),
                units::seconds(all.time.as_secs_f64()),
                "-".to_string(),
                units::byte_rate(all.bytes_per_second),
                "-".to_string(),
                "-".to_string(),
            ]);
        }
        table.without_blanks()
    }

    fn json(&self) -> Value {
        let links = self.measured.links.iter().map(|link| {
            json!({
                "from": link.from,
                "to": link.to,
                "same_node": link.same_node,
                "seconds": link.latency.as_secs_f64(),
                "bytes_per_second": link.bytes_per_second,
            })
        });
        let whole = self.measured.all_to_all.iter().map(|all| {
            json!({
                "bytes_per_pair": all.bytes_per_pair,
                "seconds": all.time.as_secs_f64(),
                "bytes_per_second": all.bytes_per_second,
            })
        });
        let ranks = self.ranks.iter().map(|rank| {
            let versions = rank.versions.iter().map(|(n, v)| (n.clone(), json!(v)));
            let places = rank.places.iter().map(|(n, v)| (n.clone(), json!(v)));
            json!({
                "host": rank.host,
                "versions": versions.collect::<serde_json::Map<_, _>>(),
                "places": places.collect::<serde_json::Map<_, _>>(),
            })
        });
        let shape = self.topology.shape;
        json!({
            "carrier": self.carrier,
            "ranks": ranks.collect::<Vec<_>>(),
            "shape": shape.map(|s| json!({ "nodes": s.nodes, "per_node": s.per_node })),
            "differences": self.differences(),
            "slow": self.slow(),
            "links": links.collect::<Vec<_>>(),
            "all_to_all": whole.collect::<Vec<_>>(),
        })
    }
}

/// The most hosts that are listed.
const SHOWN: usize = 16;

/// The links of one kind.
struct Kind {
    name: &'static str,
    same_node: bool,
    expected: fn(&ExpectedRates) -> f64,
}

const KINDS: [Kind; 2] = [
    Kind {
        name: "ranks of a node",
        same_node: true,
        expected: |expected| expected.node,
    },
    Kind {
        name: "ranks of two nodes",
        same_node: false,
        expected: |expected| expected.network,
    },
];

fn median_rate(links: &[&PairLink]) -> f64 {
    let mut rates: Vec<f64> = links.iter().map(|l| l.bytes_per_second).collect();
    rates.sort_by(f64::total_cmp);
    rates.get(rates.len() / 2).copied().unwrap_or_default()
}

/// Describes the number of links below `part` of a named rate, and the slowest of them.
fn slowest(links: &[&PairLink], part: f64, (name, rate): (&str, f64)) -> Option<String> {
    let below = links.iter().filter(|l| l.bytes_per_second < part * rate);
    let first = below
        .clone()
        .min_by(|a, b| a.bytes_per_second.total_cmp(&b.bytes_per_second))?;
    Some(format!(
        "{} of {} too slow, rank {} to {} has {}, {name} is {}",
        below.count(),
        units::count(links.len(), "link"),
        first.from,
        first.to,
        units::byte_rate(first.bytes_per_second),
        units::byte_rate(rate)
    ))
}

fn row(name: &str, links: &[&PairLink]) -> [String; 7] {
    let mut times: Vec<f64> = links.iter().map(|l| l.latency.as_secs_f64()).collect();
    times.sort_by(f64::total_cmp);
    let mut rates: Vec<&PairLink> = links.to_vec();
    rates.sort_by(|a, b| a.bytes_per_second.total_cmp(&b.bytes_per_second));
    let middle = links.len() / 2;
    [
        name.to_string(),
        links.len().to_string(),
        units::seconds(times[middle]),
        units::seconds(times[times.len() - 1]),
        units::byte_rate(rates[middle].bytes_per_second),
        units::byte_rate(rates[0].bytes_per_second),
        format!("{} to {}", rates[0].from, rates[0].to),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use moesaic::collectives::NodeShape;
    use std::time::Duration;

    fn rank(host: &str, mpi: &str) -> Rank {
        let engines = [("MPI", mpi.to_string(), "/lib/libmpi.so.12".to_string())];
        let mut value = own(&engines);
        value["host"] = json!(host);
        Rank::read(value.to_string().as_bytes())
    }

    fn report(versions: [&str; 2]) -> Report {
        let link = |from, to, same_node, micros| PairLink {
            from,
            to,
            same_node,
            latency: Duration::from_micros(micros),
            bytes_per_second: 1e9 / micros as f64,
        };
        let hosts = ["a", "a", "b", "b"];
        let versions = [versions[0], versions[0], versions[0], versions[1]];
        Report {
            expected: ExpectedRates::default(),
            carrier: "MPI (X)".to_string(),
            ranks: hosts
                .iter()
                .zip(versions)
                .map(|(h, v)| rank(h, v))
                .collect(),
            topology: Topology {
                hosts: hosts.map(str::to_string).to_vec(),
                shape: Some(NodeShape {
                    nodes: 2,
                    per_node: 2,
                }),
            },
            measured: MeasuredLinks {
                links: vec![
                    link(0, 1, true, 1),
                    link(0, 2, false, 5),
                    link(1, 3, false, 20),
                ],
                all_to_all: Vec::new(),
            },
        }
    }

    #[test]
    fn links_are_summed_up_by_kind() {
        let text = report(["5.0", "5.0"]).text(&Palette::PLAIN);
        let expected = "\
4 ranks by MPI (X): 2 nodes of 2 ranks each, in the order of ranks
  a: 2 ranks
  b: 2 ranks
";
        assert!(text.starts_with(expected), "{text}");
        assert!(text.contains("  MPI 5.0 (/lib/libmpi.so.12)\n"), "{text}");
        let nodes = text.lines().last().unwrap();
        for word in ["ranks of two nodes", "20.0 µs", "50 MB/s", "1 to 3"] {
            assert!(nodes.contains(word), "{text}");
        }
        assert!(!text.contains("differs"), "{text}");
    }

    #[test]
    fn slow_links_are_named_beside_what_was_expected() {
        let expecting = |node: f64, network: f64| Report {
            expected: ExpectedRates::new(Some(&[node, network])).unwrap(),
            ..report(["5.0", "5.0"])
        };
        // 1 GB/s in the node; 200 and 50 MB/s between nodes, of which the median is the upper.
        assert_eq!(expecting(1.9, 0.0).slow(), Vec::<String>::new());
        assert!(expecting(1.9, 0.1).verdict().is_ok());
        let slow = expecting(0.0, 0.5);
        let line = "ranks of two nodes: 2 of 2 links too slow, rank 1 to 3 has 50 MB/s, expected is \
                    500 MB/s";
        assert_eq!(slow.slow(), [line]);
        assert!(slow.text(&Palette::PLAIN).contains(line));
        assert_eq!(slow.json()["slow"], json!([line]));
        let failure = slow.verdict().unwrap_err();
        assert!(failure.message.contains("less than half"), "{failure:?}");
        assert!(expecting(2.1, 0.0).verdict().is_err());
        for wrong in [&[1.0][..], &[1.0, -1.0], &[1.0, 2.0, 3.0], &[f64::NAN, 1.0]] {
            assert!(ExpectedRates::new(Some(wrong)).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn one_slow_link_among_many_is_named_without_being_told_what_to_expect() {
        let mut report = report(["5.0", "5.0"]);
        report.measured.links[2].bytes_per_second = 40e6;
        let line = "ranks of two nodes: 1 of 2 links too slow, rank 1 to 3 has 40 MB/s, the median \
                    is 200 MB/s";
        assert_eq!(report.slow(), [line]);
        assert!(report.verdict().is_ok(), "nobody said that they are alike");
    }

    #[test]
    fn what_differs_is_named_with_its_rank() {
        let report = report(["5.0", "4.1"]);
        let expected = "MPI is 5.0 on rank 0 and 4.1 on rank 3 (b)";
        assert_eq!(report.differences(), [expected]);
        assert!(report.text(&Palette::PLAIN).contains(expected));
        assert_eq!(report.json()["differences"], json!([expected]));
    }
}
