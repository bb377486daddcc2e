//! What Linux says of nodes, pages and threads.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::Path;

/// The system's number of a NUMA node.
pub type Node = i32;

/// Memory of the process: an address and bytes behind it.
#[derive(Clone, Copy, Debug)]
pub struct Range {
    pub start: usize,
    pub bytes: usize,
}

pub fn page_size() -> usize {
    // SAFETY: asks only.
    usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(4096)
}

/// The node of each page of a range that starts with one and is not in use; a
/// negative number for a page of which the system does not say it.
pub fn nodes(range: Range) -> io::Result<Vec<Node>> {
    unmark(range);
    let end = range.start + range.bytes;
    let pages: Vec<usize> = (range.start..end).step_by(page_size()).collect();
    let mut nodes: Vec<Node> = vec![-1; pages.len()];
    let (of_this_process, stay, no_flags) = (0, std::ptr::null::<Node>(), 0);
    // SAFETY: both lists are as long as is said, and without nodes to go to nothing
    // is moved: the call only says where pages lie.
    let failed = unsafe {
        libc::syscall(
            libc::SYS_move_pages,
            of_this_process,
            pages.len(),
            pages.as_ptr(),
            stay,
            nodes.as_mut_ptr(),
            no_flags,
        )
    } != 0;
    if failed {
        Err(io::Error::last_os_error())
    } else {
        Ok(nodes)
    }
}

/// A kernel that balances nodes marks pages to see who uses them, and does not say
/// where marked ones lie. A change of what is allowed takes the marks away.
fn unmark(range: Range) {
    let pages = range.bytes / page_size() * page_size();
    for allowed in [libc::PROT_READ, libc::PROT_READ | libc::PROT_WRITE] {
        // SAFETY: whole pages of memory that nobody uses meanwhile, and all is
        // allowed again; a refusal changes nothing.
        unsafe { libc::mprotect(range.start as *mut libc::c_void, pages, allowed) };
    }
}

/// How many of some pages lie on each node.
pub fn count(nodes: &[Node]) -> BTreeMap<Node, usize> {
    let mut counts = BTreeMap::new();
    for node in nodes {
        *counts.entry(*node).or_insert(0) += 1;
    }
    counts
}

/// The node that the calling thread runs on now.
pub fn node_here() -> Option<Node> {
    let (mut processor, mut node) = (0u32, 0u32);
    let nothing = std::ptr::null_mut::<u8>();
    // SAFETY: both numbers are live; the third argument is not used any more.
    let failed =
        unsafe { libc::syscall(libc::SYS_getcpu, &raw mut processor, &raw mut node, nothing) } != 0;
    if failed {
        None
    } else {
        Node::try_from(node).ok()
    }
}

/// The nodes of the machine and their processors, as `node0: 0-3`.
pub fn machine() -> Vec<String> {
    let of = |name: &str, folder: &Path| {
        let list = fs::read_to_string(folder.join("cpulist")).ok()?;
        Some(format!("{name}: {}", list.trim()))
    };
    listed("/sys/devices/system/node", "node", of)
}

/// The threads of this process and the processors that each may use.
pub fn threads() -> Vec<String> {
    let of = |_: &str, folder: &Path| {
        let name = fs::read_to_string(folder.join("comm")).ok()?;
        let status = fs::read_to_string(folder.join("status")).ok()?;
        let may = |line: &str| Some(line.strip_prefix("Cpus_allowed_list:")?.trim().to_string());
        let may = status.lines().find_map(may)?;
        Some(format!("{}: {may}", name.trim()))
    };
    listed("/proc/self/task", "", of)
}

/// What is to be said of each numbered entry of a folder, in order.
fn listed(folder: &str, prefix: &str, of: impl Fn(&str, &Path) -> Option<String>) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let numbered = entries.filter_map(|entry| {
        let name = entry.file_name().into_string().ok()?;
        let number: u32 = name.strip_prefix(prefix)?.parse().ok()?;
        Some((number, of(&name, &entry.path())?))
    });
    let lines: BTreeMap<u32, String> = numbered.collect();
    lines.into_values().collect()
}

/// Keeps the calling thread on the first processor that it may use.
pub fn stay() -> io::Result<()> {
    // SAFETY: a set of processors is plain bits, all zero is the empty one.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    let (this_thread, bytes) = (0, size_of_val(&set));
    // SAFETY: the set is this large.
    if unsafe { libc::sched_getaffinity(this_thread, bytes, &raw mut set) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let numbers = 0..libc::CPU_SETSIZE as usize;
    // SAFETY: every number is below CPU_SETSIZE.
    let others = numbers.filter(|&cpu| unsafe { libc::CPU_ISSET(cpu, &set) });
    for cpu in others.skip(1).collect::<Vec<_>>() {
        // SAFETY: as above.
        unsafe { libc::CPU_CLR(cpu, &mut set) };
    }
    // SAFETY: as for the question.
    match unsafe { libc::sched_setaffinity(this_thread, bytes, &raw const set) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
