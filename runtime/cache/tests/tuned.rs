//! Tunings in a store: round trips, damage, foreign tunings, and packs.

use crate::common::{key, source, stored};
use moesaic_cache::{Bucket, Store, Tuned, TunedMachine, hash_source};
use moesaic_kernel::Target;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

fn machine(threads: u32) -> TunedMachine {
    let name = "A CPU / with: odd \"names\"".to_string();
    TunedMachine { name, threads }
}

fn target() -> Target {
    source("a").target
}

fn tuned(threads: u32, kernels: &[&str]) -> Tuned {
    Tuned {
        target: target(),
        layer: hash_source("the layer"),
        machine: machine(threads),
        name: "mixtral".to_string(),
        buckets: vec![bucket(1, 64, kernels), bucket(64, 96, &[])],
    }
}

fn bucket(tokens: usize, rows: usize, kernels: &[&str]) -> Bucket {
    let kernels = kernels.iter().map(|k| hash_source(&source(k).text));
    Bucket {
        tokens,
        sizes: BTreeMap::from([("tile_rows".to_string(), rows)]),
        kernels: kernels.collect(),
        gain: 1.0 / 0.937,
    }
}

fn find(store: &Store, threads: u32) -> Option<Tuned> {
    store.tuned(target(), &hash_source("the layer"), &machine(threads))
}

#[test]
fn a_tuning_is_found_by_layer_and_machine() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path());
    assert!(!store.has_tunings(target()));
    assert_eq!(find(&store, 2), None);
    store.can_keep_tunings().unwrap();
    assert!(!store.has_tunings(target()), "trying leaves nothing");
    store.keep_tuned(&tuned(2, &[])).unwrap();
    store.keep_tuned(&tuned(4, &[])).unwrap();
    // Compare with a tolerance, because JSON may lose the last bit of a number.
    let mut found = find(&store, 2).unwrap();
    for bucket in &mut found.buckets {
        assert!((bucket.gain - 1.0 / 0.937).abs() < 1e-12);
        bucket.gain = 1.0 / 0.937;
    }
    assert_eq!(found, tuned(2, &[]));
    assert_eq!(find(&store, 3), None);
    assert!(store.has_tunings(target()));
    let layer = hash_source("the layer");
    assert_eq!(store.tunings_of(target(), &layer).len(), 2);
    assert_eq!(store.tunings_of(target(), &hash_source("other")), []);
    // The tuning kept last replaces the earlier one.
    let better = Tuned {
        buckets: Vec::new(),
        ..tuned(2, &[])
    };
    store.keep_tuned(&better).unwrap();
    assert!(find(&store, 2).unwrap().buckets.is_empty());
    assert_eq!(store.tunings().len(), 2);
}

#[test]
fn what_is_damaged_or_foreign_is_not_there() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path());
    let path = store.keep_tuned(&tuned(2, &[])).unwrap();
    let other = store.keep_tuned(&tuned(4, &[])).unwrap();
    let good = fs::read(&path).unwrap();
    for length in 0..good.len() {
        fs::write(&path, &good[..length]).unwrap();
        assert_eq!(find(&store, 2), None, "{length} bytes");
    }
    fs::write(&path, [0xff; 300]).unwrap();
    assert_eq!(find(&store, 2), None);
    for at in 0..good.len() {
        let mut bytes = good.clone();
        bytes[at] ^= 1;
        fs::write(&path, &bytes).unwrap();
        assert_eq!(find(&store, 2), None, "byte {at} is another");
    }
    let text = String::from_utf8(good.clone()).unwrap();
    let lines = text.lines().filter(|line| !line.contains("\"check\""));
    let unchecked: Vec<&str> = lines.collect();
    fs::write(&path, unchecked.join("\n")).unwrap();
    assert_eq!(find(&store, 2), None, "nothing says that it is whole");
    fs::copy(&other, &path).unwrap();
    assert_eq!(find(&store, 2), None, "another machine's");
    fs::remove_file(&path).unwrap();
    fs::create_dir(&path).unwrap();
    assert_eq!(find(&store, 2), None, "a folder");
    assert!(store.keep_tuned(&tuned(2, &[])).is_err());
    fs::remove_dir(&path).unwrap();
    fs::write(&path, &good).unwrap();
    assert!(find(&store, 2).is_some());
}

#[test]
fn a_store_that_cannot_keep_says_so() {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir(dir.path().join("v1")).unwrap();
    fs::write(dir.path().join("v1/tuned"), "a file").unwrap();
    let store = Store::open(dir.path());
    let said = store.can_keep_tunings().unwrap_err().to_string();
    assert!(
        said.contains("cannot make") && said.contains("v1/tuned"),
        "{said}"
    );
    assert!(store.keep_tuned(&tuned(2, &[])).is_err());
    assert_eq!(find(&store, 2), None);
}

#[test]
fn writers_at_the_same_time_leave_one_whole_file() {
    let dir = tempfile::tempdir().unwrap();
    std::thread::scope(|scope| {
        for writer in 0..4 {
            let store = Store::open(dir.path());
            scope.spawn(move || {
                for i in 0..25 {
                    let one = Tuned {
                        buckets: vec![bucket(1, writer * 100 + i, &[])],
                        ..tuned(2, &[])
                    };
                    store.keep_tuned(&one).unwrap();
                    assert!(find(&store, 2).is_some());
                }
            });
        }
    });
    let files = fs::read_dir(dir.path().join("v1/tuned")).unwrap().count();
    assert_eq!(files, 1);
}

fn put(store: &Store, names: &[&str]) {
    for name in names {
        let source = source(name);
        let kernel = stored(&source, 500);
        store.put(&key(&source), &source, &kernel).unwrap();
    }
}

fn import(pack: &Path, dir: &Path) -> (usize, Vec<Tuned>) {
    let store = Store::open(dir);
    let imported = store.import(pack).unwrap();
    (imported.tunings, store.tunings())
}

#[test]
fn a_pack_has_the_tunings_whose_kernels_it_has() {
    let dir = tempfile::tempdir().unwrap();
    let (store, pack) = (
        Store::open(dir.path().join("from")),
        dir.path().join("p.tar.gz"),
    );
    put(&store, &["a", "b"]);
    store.keep_tuned(&tuned(2, &["a", "b"])).unwrap();
    store.keep_tuned(&tuned(3, &["a", "c"])).unwrap();
    store.keep_tuned(&tuned(4, &[])).unwrap();
    assert_eq!(store.export(&pack, |_| true).unwrap().tunings, 1);
    let to = dir.path().join("to");
    let (added, all) = import(&pack, &to);
    assert_eq!((added, all.len(), all[0].machine.threads), (1, 1, 2));
    // An import does not replace the store's own tuning.
    let own = Tuned {
        name: "own".to_string(),
        ..tuned(2, &[])
    };
    Store::open(&to).keep_tuned(&own).unwrap();
    let (added, all) = import(&pack, &to);
    assert_eq!((added, all[0].name.as_str()), (0, "own"));
    // A tuning is not exported without all of its kernels.
    let only_a = |kernel: &moesaic_cache::Listed| kernel.info.name == "a";
    assert_eq!(store.export(&pack, only_a).unwrap().tunings, 0);
}

/// Returns a file of the version that had the same sizes for all numbers of tokens.
fn former() -> String {
    let mut file = serde_json::to_value(tuned(2, &["a"])).unwrap();
    let fields = file.as_object_mut().unwrap();
    fields.remove("buckets");
    fields.extend([
        ("sizes".to_string(), serde_json::json!({ "tile_rows": 96 })),
        ("kernels".to_string(), serde_json::json!([])),
        ("tokens".to_string(), serde_json::json!([1, 64])),
        ("gain".to_string(), serde_json::json!(1.25)),
    ]);
    file.to_string()
}

#[test]
fn an_old_tuning_is_passed_over_and_replaced() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path().join("from"));
    let path = store.keep_tuned(&tuned(2, &["a"])).unwrap();
    put(&store, &["a"]);
    let pack = dir.path().join("p.tar.gz");
    store.export(&pack, |_| true).unwrap();
    fs::write(&path, former()).unwrap();
    assert_eq!(find(&store, 2), None);
    // A pack may bring the tuning in the new format.
    assert_eq!(store.import(&pack).unwrap().tunings, 1);
    assert!(find(&store, 2).is_some());
}

#[test]
fn a_pack_of_an_older_version_brings_its_kernels() {
    let dir = tempfile::tempdir().unwrap();
    let (from, to) = (dir.path().join("from"), dir.path().join("to"));
    let store = Store::open(&from);
    put(&store, &["a"]);
    store.keep_tuned(&tuned(2, &["a"])).unwrap();
    let pack = dir.path().join("p.tar.gz");
    store.export(&pack, |_| true).unwrap();
    let old = rewritten(&pack, |name, bytes| {
        if name.starts_with("tuned/") {
            former().into_bytes()
        } else {
            bytes
        }
    });
    fs::write(&pack, old).unwrap();
    let (added, all) = import(&pack, &to);
    assert_eq!((added, all), (0, vec![]));
    assert_eq!(Store::open(&to).list().len(), 1);
}

/// Returns a pack whose members were changed.
fn rewritten(pack: &Path, change: impl Fn(&str, Vec<u8>) -> Vec<u8>) -> Vec<u8> {
    let file = fs::File::open(pack).unwrap();
    let mut from = tar::Archive::new(flate2::read::GzDecoder::new(file));
    let to = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    let mut to = tar::Builder::new(to);
    for entry in from.entries().unwrap() {
        let mut entry = entry.unwrap();
        let name = entry.path().unwrap().display().to_string();
        let mut bytes = Vec::new();
        std::io::Read::read_to_end(&mut entry, &mut bytes).unwrap();
        let bytes = change(&name, bytes);
        let mut header = entry.header().clone();
        header.set_size(bytes.len() as u64);
        to.append_data(&mut header, &name, &*bytes).unwrap();
    }
    to.into_inner().unwrap().finish().unwrap()
}

#[test]
fn a_failed_import_takes_tunings_back() {
    let dir = tempfile::tempdir().unwrap();
    let (store, pack) = (
        Store::open(dir.path().join("from")),
        dir.path().join("p.tar.gz"),
    );
    put(&store, &["a"]);
    store.keep_tuned(&tuned(2, &["a"])).unwrap();
    store.keep_tuned(&tuned(3, &["a"])).unwrap();
    store.export(&pack, |_| true).unwrap();
    // A directory blocks the second tuning's file.
    let to = Store::open(dir.path().join("to"));
    let names = |store: &Store| {
        let files = fs::read_dir(store.dir().join("v1/tuned"))
            .unwrap()
            .flatten();
        let mut names: Vec<_> = files.map(|file| file.path()).collect();
        names.sort();
        names
    };
    let last = names(&store).pop().unwrap();
    let taken = to.dir().join("v1/tuned").join(last.file_name().unwrap());
    fs::create_dir_all(&taken).unwrap();
    assert!(to.import(&pack).is_err());
    assert_eq!(names(&to), [taken]);
    assert!(to.list().is_empty());
}
