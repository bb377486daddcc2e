//! The processors that a rank runs on: those of its GPU's NUMA node.

use moesaic::cpu::numbered_nodes;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::fs;
use std::path::Path;

/// The set of processors that a rank is bound to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Bind {
    /// Nothing
    Off,
    /// The processors of a NUMA node, if there are several nodes
    Numa,
    /// Processors of its own, within a NUMA node
    Cores,
}

/// The parts of a machine that decide where ranks run.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct NodeResources {
    /// NUMA nodes by the system's number, with the processors that may be used.
    nodes: Vec<(u32, Vec<usize>)>,
    /// GPUs in the order of their PCI addresses, with their nodes.
    gpus: Vec<(String, Option<u32>)>,
    /// The first processor of each processor's core.
    cores: BTreeMap<usize, usize>,
    /// The reason why GPUs do not decide, although there are some.
    pub trouble: Option<String>,
}

/// The place of a rank.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RankPlace {
    /// The PCI address of the GPU that decided.
    pub gpu: Option<String>,
    /// The NUMA node.
    pub node: Option<u32>,
    /// Its processors; an empty list stands for all.
    pub processors: Vec<usize>,
}

/// PCI vendor numbers of NVIDIA and AMD, with the variables that limit the GPUs a process sees.
const VENDORS: [(&str, &[&str]); 2] = [
    ("0x10de", &["CUDA_VISIBLE_DEVICES"]),
    (
        "0x1002",
        &[
            "ROCR_VISIBLE_DEVICES",
            "HIP_VISIBLE_DEVICES",
            "CUDA_VISIBLE_DEVICES",
        ],
    ),
];

impl NodeResources {
    /// Reads a folder with the structure of Linux's `/sys`.
    pub fn read(
        sysfs: &Path,
        processors: &[usize],
        variable: impl Fn(&str) -> Option<String>,
    ) -> NodeResources {
        let mut nodes = numbered_nodes(&sysfs.join("devices/system/node"), processors);
        nodes.retain(|(_, processors)| !processors.is_empty());
        let mut machine = NodeResources {
            nodes,
            ..NodeResources::default()
        };
        for processor in processors {
            machine.cores.insert(*processor, core(sysfs, *processor));
        }
        for (vendor, variables) in VENDORS {
            let gpus = gpus(sysfs, vendor);
            if gpus.is_empty() {
                continue;
            }
            let list = variables.iter().find_map(|name| variable(name));
            match visible(gpus, list.as_deref()) {
                Ok(gpus) => machine.gpus = gpus,
                Err(trouble) => machine.trouble = Some(trouble),
            }
            break;
        }
        machine
    }

    /// Returns a place for each of `ranks` ranks. A rank is where its GPU is; without GPUs, or
    /// where the system does not say on which node they are, ranks go round the nodes.
    pub fn places(&self, bind: Bind, ranks: usize) -> Vec<RankPlace> {
        if bind == Bind::Off || self.nodes.is_empty() {
            return vec![RankPlace::default(); ranks];
        }
        let homes: Vec<(Option<String>, usize)> = (0..ranks).map(|r| self.home(r)).collect();
        let one = |rank: usize| {
            let (gpu, node) = &homes[rank];
            let (number, processors) = &self.nodes[*node];
            let same = |list: &[(Option<String>, usize)]| {
                list.iter().filter(|(_, other)| other == node).count()
            };
            let processors = match bind {
                Bind::Cores => self.share(processors, same(&homes[..rank]), same(&homes)),
                _ if self.nodes.len() == 1 => Vec::new(),
                _ => processors.clone(),
            };
            RankPlace {
                gpu: gpu.clone(),
                node: Some(*number),
                processors,
            }
        };
        (0..ranks).map(one).collect()
    }

    /// Returns the GPU of a rank, if a GPU decides, and the index of the rank's node.
    fn home(&self, rank: usize) -> (Option<String>, usize) {
        let around = rank % self.nodes.len();
        if self.gpus.is_empty() {
            return (None, around);
        }
        let (address, node) = &self.gpus[rank % self.gpus.len()];
        let index = self
            .nodes
            .iter()
            .position(|(number, _)| Some(*number) == *node);
        index.map_or((None, around), |index| (Some(address.clone()), index))
    }

    /// Returns the share of rank `index` of `ranks` in whole cores, or all processors if there are
    /// fewer cores than ranks.
    fn share(&self, processors: &[usize], index: usize, ranks: usize) -> Vec<usize> {
        let core = |processor: &usize| self.cores.get(processor).copied().unwrap_or(*processor);
        let cores: BTreeSet<usize> = processors.iter().map(core).collect();
        let cores: Vec<usize> = cores.into_iter().collect();
        if ranks > cores.len() {
            return processors.to_vec();
        }
        let own = &cores[index * cores.len() / ranks..(index + 1) * cores.len() / ranks];
        let mut own: Vec<usize> = processors
            .iter()
            .copied()
            .filter(|p| own.contains(&core(p)))
            .collect();
        own.sort_unstable();
        own
    }
}

/// Returns the first processor of a processor's core.
fn core(sysfs: &Path, processor: usize) -> usize {
    let file = format!("devices/system/cpu/cpu{processor}/topology/thread_siblings_list");
    let text = fs::read_to_string(sysfs.join(file)).unwrap_or_default();
    let first = text.split([',', '-']).next().unwrap_or_default();
    first.trim().parse().unwrap_or(processor)
}

/// Returns the GPUs of a vendor: displays and accelerators among the PCI devices.
fn gpus(sysfs: &Path, vendor: &str) -> Vec<(String, Option<u32>)> {
    let entries = fs::read_dir(sysfs.join("bus/pci/devices"))
        .into_iter()
        .flatten();
    let one = |entry: fs::DirEntry| {
        let read = |name: &str| {
            let text = fs::read_to_string(entry.path().join(name)).ok()?;
            Some(text.trim().to_string())
        };
        let class = read("class")?;
        let gpu = class.starts_with("0x03") || class.starts_with("0x1200");
        let address = entry.file_name().into_string().ok()?;
        // The file holds -1 if the firmware does not name a node.
        let node = read("numa_node").and_then(|node| node.parse().ok());
        (gpu && read("vendor")? == vendor).then_some((address, node))
    };
    let mut gpus: Vec<_> = entries.flatten().filter_map(one).collect();
    gpus.sort();
    gpus
}

/// Returns the GPUs that a variable such as CUDA_VISIBLE_DEVICES leaves, in its order.
fn visible(
    gpus: Vec<(String, Option<u32>)>,
    list: Option<&str>,
) -> Result<Vec<(String, Option<u32>)>, String> {
    let Some(list) = list else { return Ok(gpus) };
    let words = list
        .split(',')
        .map(str::trim)
        .filter(|word| !word.is_empty());
    let one = |word: &str| {
        let number: Option<usize> = word.parse().ok();
        number.and_then(|number| gpus.get(number).cloned())
    };
    words
        .map(|word| {
            one(word).ok_or_else(|| format!("GPU `{word}` is none of 0 to {}", gpus.len() - 1))
        })
        .collect()
}

impl fmt::Display for RankPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let node = self
            .node
            .map_or("any node".to_string(), |n| format!("node {n}"));
        write!(f, "{node}")?;
        if let Some(gpu) = &self.gpu {
            write!(f, " of GPU {gpu}")?;
        }
        if self.processors.is_empty() {
            f.write_str(", any processor")
        } else {
            write!(f, ", processors {}", ranges(&self.processors))
        }
    }
}

/// Writes ascending numbers as ranges, such as `0-3,8`.
pub fn ranges(numbers: &[usize]) -> String {
    let mut list: Vec<(usize, usize)> = Vec::new();
    for number in numbers {
        match list.last_mut() {
            Some((_, last)) if *last + 1 == *number => *last = *number,
            _ => list.push((*number, *number)),
        }
    }
    let one = |(first, last): &(usize, usize)| {
        if first == last {
            first.to_string()
        } else {
            format!("{first}-{last}")
        }
    };
    list.iter().map(one).collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A machine of two nodes of four processors, two threads a core; GPUs as (address,
    /// vendor, node).
    fn tree(gpus: &[(&str, &str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        let write = |path: String, text: &str| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, format!("{text}\n")).unwrap();
        };
        write("devices/system/node/node0/cpulist".into(), "0-1,4-5");
        write("devices/system/node/node1/cpulist".into(), "2-3,6-7");
        for cpu in 0..8 {
            let siblings = format!("{},{}", cpu % 4, cpu % 4 + 4);
            write(
                format!("devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"),
                &siblings,
            );
        }
        for (address, vendor, node) in gpus {
            let folder = format!("bus/pci/devices/{address}");
            write(format!("{folder}/class"), "0x030200");
            write(format!("{folder}/vendor"), vendor);
            write(format!("{folder}/numa_node"), node);
        }
        root
    }

    fn machine(gpus: &[(&str, &str, &str)], variables: &[(&str, &str)]) -> NodeResources {
        let root = tree(gpus);
        let all: Vec<usize> = (0..8).collect();
        let variable = |name: &str| {
            let found = variables.iter().find(|(key, _)| *key == name);
            found.map(|(_, value)| value.to_string())
        };
        NodeResources::read(root.path(), &all, variable)
    }

    fn nodes(machine: &NodeResources, ranks: usize) -> Vec<Option<u32>> {
        let places = machine.places(Bind::Numa, ranks).into_iter();
        places.map(|place| place.node).collect()
    }

    fn processors(machine: &NodeResources, bind: Bind, ranks: usize) -> Vec<String> {
        let places = machine.places(bind, ranks).into_iter();
        places.map(|place| ranges(&place.processors)).collect()
    }

    const CARDS: [(&str, &str, &str); 4] = [
        ("0000:c1:00.0", "0x10de", "0"),
        ("0000:17:00.0", "0x10de", "1"),
        ("0000:3b:00.0", "0x10de", "1"),
        ("0000:02:00.0", "0x1a03", "0"),
    ];

    #[test]
    fn a_rank_is_where_its_gpu_is() {
        let found = machine(&CARDS, &[]);
        assert_eq!(nodes(&found, 4), [Some(1), Some(1), Some(0), Some(1)]);
        let places = found.places(Bind::Numa, 3);
        assert_eq!(
            places[2].to_string(),
            "node 0 of GPU 0000:c1:00.0, processors 0-1,4-5"
        );
        let some = machine(&CARDS, &[("CUDA_VISIBLE_DEVICES", "2, 0")]);
        assert_eq!(nodes(&some, 2), [Some(0), Some(1)]);
    }

    #[test]
    fn without_a_gpus_node_ranks_go_round() {
        assert_eq!(nodes(&machine(&[], &[]), 3), [Some(0), Some(1), Some(0)]);
        let unknown = [("0000:17:00.0", "0x1002", "-1")];
        assert_eq!(nodes(&machine(&unknown, &[]), 2), [Some(0), Some(1)]);
        let names = machine(&CARDS, &[("CUDA_VISIBLE_DEVICES", "GPU-4bf1,1")]);
        assert_eq!(nodes(&names, 2), [Some(0), Some(1)]);
        assert_eq!(names.trouble.unwrap(), "GPU `GPU-4bf1` is none of 0 to 2");
    }

    #[test]
    fn ranks_of_a_node_share_it_by_cores() {
        let found = machine(&[], &[]);
        let both = ["0-1,4-5", "2-3,6-7", "0-1,4-5", "2-3,6-7"];
        assert_eq!(processors(&found, Bind::Numa, 4), both);
        assert_eq!(
            processors(&found, Bind::Cores, 4),
            ["0,4", "2,6", "1,5", "3,7"]
        );
        assert_eq!(processors(&found, Bind::Off, 2), ["", ""]);
        // Five ranks on the four cores: node 0 has three ranks, which share both of its.
        let five = processors(&found, Bind::Cores, 5);
        assert_eq!(five, ["0-1,4-5", "2,6", "0-1,4-5", "3,7", "0-1,4-5"]);
    }

    #[test]
    fn a_machine_of_one_node_binds_nothing_to_it() {
        let root = tree(&CARDS);
        let one = NodeResources::read(root.path(), &[0, 4], |_| None);
        assert_eq!(processors(&one, Bind::Numa, 2), ["", ""]);
        let nothing = NodeResources::read(Path::new("/no"), &[0, 1], |_| None);
        assert_eq!(
            nothing.places(Bind::Cores, 2),
            vec![RankPlace::default(); 2]
        );
    }
}
