//! The first difference between what two builds wrote.

use safetensors::SafeTensors;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

/// Compares every file of two folders, before and after. Gives the number of
/// files, or what the first difference is.
pub fn folders(before: &Path, after: &Path) -> Result<usize, String> {
    let (before, after) = (files(before, ""), files(after, ""));
    for (name, text) in &before {
        match after.get(name) {
            Some(new) if new == text => {}
            Some(new) => return Err(format!("{name}, {}", first_line(text, new))),
            None => return Err(format!("{name} is missing")),
        }
    }
    match after.keys().find(|name| !before.contains_key(*name)) {
        Some(name) => Err(format!("{name} is new")),
        None if before.is_empty() => Err("nothing was written".to_string()),
        None => Ok(before.len()),
    }
}

/// Every file below a folder, by its path there.
fn files(folder: &Path, prefix: &str) -> BTreeMap<String, Vec<u8>> {
    let mut list = BTreeMap::new();
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let name = format!("{prefix}{}", entry.file_name().to_string_lossy());
        match entry.path() {
            path if path.is_dir() => list.extend(files(&path, &format!("{name}/"))),
            path => {
                list.insert(name, fs::read(path).unwrap_or_default());
            }
        }
    }
    list
}

/// The first line that differs, as it was and as it is.
fn first_line(before: &[u8], after: &[u8]) -> String {
    let (before, after) = [before, after].map(String::from_utf8_lossy).into();
    let same = before.lines().zip(after.lines());
    let same = same.take_while(|(old, new)| old == new).count();
    let line = |text: &str| text.lines().nth(same).unwrap_or("<its end>").to_string();
    let (old, new) = (line(&before), line(&after));
    format!("line {}:\n  was {old}\n  is  {new}", same + 1)
}

/// Compares two safetensors files, before and after, tensor by tensor. Gives
/// the number of tensors, or what the first difference is.
pub fn tensors(before: &Path, after: &Path) -> Result<usize, String> {
    let read = |path: &Path| fs::read(path).map_err(|e| format!("{}: {e}", path.display()));
    let (before, after) = (read(before)?, read(after)?);
    let parse = |bytes| SafeTensors::deserialize(bytes).map_err(|error| error.to_string());
    let (before, after) = (parse(&before)?, parse(&after)?);
    for (name, old) in before.iter() {
        let Ok(new) = after.tensor(name) else {
            return Err(format!("tensor {name} is missing"));
        };
        let head = |view: &safetensors::tensor::TensorView<'_>| {
            format!("{:?} {:?}", view.dtype(), view.shape())
        };
        if head(&old) != head(&new) {
            return Err(format!("{name} was {}, is {}", head(&old), head(&new)));
        }
        if let Some(byte) = old.data().iter().zip(new.data()).position(|(a, b)| a != b) {
            return Err(format!("{name} differs from byte {byte} on"));
        }
    }
    match after
        .names()
        .into_iter()
        .find(|name| before.tensor(name).is_err())
    {
        Some(name) => Err(format!("tensor {name} is new")),
        None => Ok(before.len()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use safetensors::Dtype;
    use safetensors::tensor::TensorView;

    #[test]
    fn a_changed_line_a_lost_file_and_a_new_one_are_named() {
        let dir = tempfile::tempdir().unwrap();
        let [before, after] = ["a", "b"].map(|name| dir.path().join(name));
        fs::create_dir_all(before.join("cpu")).unwrap();
        fs::create_dir_all(after.join("cpu")).unwrap();
        assert_eq!(folders(&before, &after).unwrap_err(), "nothing was written");

        fs::write(before.join("cpu/k.c"), "one\ntwo\n").unwrap();
        assert_eq!(folders(&before, &after).unwrap_err(), "cpu/k.c is missing");
        fs::write(after.join("cpu/k.c"), "one\nthree\n").unwrap();
        let changed = folders(&before, &after).unwrap_err();
        assert_eq!(changed, "cpu/k.c, line 2:\n  was two\n  is  three");
        fs::write(after.join("cpu/k.c"), "one\ntwo\n").unwrap();
        assert_eq!(folders(&before, &after), Ok(1));
        fs::write(after.join("cpu/l.c"), "").unwrap();
        assert_eq!(folders(&before, &after).unwrap_err(), "cpu/l.c is new");
    }

    #[test]
    fn a_tensor_that_differs_in_one_bit_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let [before, after] = ["a", "b"].map(|name| dir.path().join(name));
        let write = |path: &Path, name: &str, bytes: &[u8]| {
            let view = TensorView::new(Dtype::F32, vec![2], bytes).unwrap();
            safetensors::serialize_to_file([(name, view)], None, path).unwrap();
        };
        write(&before, "y", &[0; 8]);
        write(&after, "y", &[0; 8]);
        assert_eq!(tensors(&before, &after), Ok(1));
        write(&after, "y", &[0, 0, 0, 0, 0, 0, 0, 128]);
        let found = tensors(&before, &after).unwrap_err();
        assert_eq!(found, "y differs from byte 7 on");
        write(&after, "z", &[0; 8]);
        assert_eq!(tensors(&before, &after).unwrap_err(), "tensor y is missing");
    }
}
