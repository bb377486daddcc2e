//! `moesaic precompile`: caches and packs.

use crate::common::*;

#[test]
fn precompile_fills_a_cache_and_a_pack_fills_another() {
    let small = Small::new();
    let path = |name: &str| small.dir.path().join(name).display().to_string();
    let (first, second, pack) = (path("first"), path("second"), path("pack.tar.gz"));
    let targets = ["precompile", "--target", "cpu,cpu:portable", "--json"];
    let into = |more: &[&str]| with_spec(&[&targets, more].concat(), &small.spec).json();
    let states = |json: &serde_json::Value, state: &str| {
        json["kernels"]
            .as_array()
            .unwrap()
            .iter()
            .filter(|k| k["state"] == state)
            .count()
    };
    let cold = into(&["--cache", &first]);
    let kernels = states(&cold, "miss");
    assert!(kernels >= 5 && states(&cold, "hit") == 0, "{cold}");
    assert_eq!(states(&into(&["--cache", &first]), "hit"), kernels);

    let exported = moesaic(["cache", "export", &pack, "--cache", &first, "--json"]).json();
    assert_eq!(exported["kernels"], kernels);
    let listed = |words: &[&str]| {
        let json = moesaic([&["cache", "list", "--json"], words].concat()).json();
        let kernels = json["kernels"].as_array().unwrap().clone();
        kernels.into_iter().map(|mut kernel| {
            let path = kernel["path"].take();
            let used = kernel["used"].take();
            (kernel, path.as_str().unwrap().to_string(), used.is_null())
        })
    };
    let in_pack: Vec<_> = listed(&[&pack]).collect();
    let in_cache: Vec<_> = listed(&["--cache", &first]).collect();
    assert_eq!(in_pack.len(), kernels);
    for (packed, stored) in in_pack.iter().zip(&in_cache) {
        assert_eq!(packed.0, stored.0);
        let key = packed.0["key"].as_str().unwrap();
        assert!(packed.1.ends_with(&format!(".{key}.kernel")), "{packed:?}");
        assert_eq!((packed.2, stored.2), (true, false));
    }
    let imported = moesaic(["cache", "import", &pack, "--cache", &second, "--json"]).json();
    assert_eq!(imported["added"], kernels);
    let again = moesaic(["cache", "import", &pack, "--cache", &second, "--json"]).json();
    assert_eq!(
        (&again["added"], &again["present"]),
        (&0.into(), &kernels.into())
    );
    small.run(&["--strict", "--cache", &second]).ok();
}

#[test]
fn precompile_makes_a_pack_and_shows_a_table() {
    let small = Small::new();
    let path = |name: &str| small.dir.path().join(name).display().to_string();
    let (pack, cache) = (path("pack.tar.gz"), path("cache"));
    let precompile = |more: &[&str]| {
        with_spec(
            &[&["precompile", "--cache", &cache, "--target"], more].concat(),
            &small.spec,
        )
        .ok()
    };
    precompile(&["cpu:portable"]);
    let text = precompile(&["cpu", "-o", &pack]);
    for part in [
        "LAYER",
        "KERNEL",
        "TARGET",
        "BYTES",
        "grouped_gemm_up",
        "miss",
        "5 kernels: 5 compiled",
        "(5 kernels, ",
    ] {
        assert!(text.contains(part), "{part:?} is not in {text}");
    }
    let list = moesaic(["cache", "list", &pack]).ok();
    let rows: Vec<&str> = list.lines().filter(|l| l.contains("  small  ")).collect();
    assert_eq!(rows.len(), 5, "{list}");
    assert!(list.contains(&format!(", in {pack}\n")), "{list}");
    let again = precompile(&["cpu", "-o", &pack]);
    assert!(again.contains("0 compiled, 5 from the cache"), "{again}");
    assert_eq!(&std::fs::read(&pack).unwrap()[..2], [0x1f, 0x8b]);
    let cut = write(small.dir.path(), "cut.tar.gz", "no pack");
    moesaic(["cache", "list", cut.to_str().unwrap()]).fails(2, &["is truncated or damaged"]);
    moesaic(["cache", "list", "/no/pack"]).fails(2, &["cannot read the pack"]);
    let folder = small.dir.path().to_str().unwrap();
    let hint = format!("`moesaic cache list --cache {folder}`");
    moesaic(["cache", "list", folder]).fails(2, &["is a directory, not a pack", &hint]);
    moesaic(["cache", "list", &pack, "--cache", &cache]).fails(2, &["cannot be used with"]);
    let cache = path("c");
    moesaic(["cache", "import", cut.to_str().unwrap(), "--cache", &cache])
        .fails(2, &["is truncated or damaged"]);
    moesaic(["cache", "import", "/no/pack", "--cache", &cache]).fails(2, &["cannot read the pack"]);
}

/// Without `--layer` every layer with experts, alike ones once.
#[test]
fn precompile_covers_the_layers_of_a_model() {
    let cache = scratch();
    let precompile = |model: &str, more: &[&str]| {
        let file = std::path::PathBuf::from(model);
        let model = if file.is_absolute() {
            file
        } else {
            repository(&format!("tests/oracle/{model}"))
        };
        let mut call = command();
        call.args(["precompile", "--target", "cpu", "--json", "--cache"]);
        call.arg(cache.path()).arg("--hf");
        finish(call.arg(model).args(more))
    };
    let listed = |json: &serde_json::Value, key: &str| {
        let kernels = json["kernels"].as_array().unwrap().iter();
        let values = kernels.map(|kernel| kernel[key].as_str().unwrap().to_string());
        values.collect::<std::collections::BTreeSet<_>>()
    };
    // Text and vision experts of two layers, of which the first is dense.
    let all = precompile("families/ernie4_5_vl_moe", &[]);
    assert!(
        all.stderr
            .contains("2 layers with experts, 2 of them different")
    );
    assert!(all.stderr.contains("the experts of text tokens"));
    let all = all.json();
    let layers = ["ernie4-5-vl-moe-text-layer1", "ernie4-5-vl-moe-text-layer3"];
    assert_eq!(listed(&all, "layer"), layers.map(str::to_string).into());
    for layer in ["--layer=1", "--layer=3"] {
        let one = precompile("families/ernie4_5_vl_moe", &[layer]).json();
        assert_eq!(listed(&one, "state"), ["hit".to_string()].into());
        assert!(listed(&one, "key").is_subset(&listed(&all, "key")));
        assert!(
            one["kernels"].as_array().unwrap().len() < all["kernels"].as_array().unwrap().len()
        );
    }
    let alike = precompile("hf/qwen3_moe", &[]);
    let said = "2 layers with experts, 1 of them different";
    assert!(alike.stderr.contains(said), "{}", alike.stderr);
    let name = "qwen3-moe-layer0".to_string();
    assert_eq!(listed(&alike.json(), "layer"), [name].into());

    let config = |text: &str| {
        let file = write(cache.path(), "config.json", text);
        precompile(file.to_str().unwrap(), &[])
    };
    config(r#"{"model_type": "gemma4_text"}"#).fails(2, &["enable_moe_block is false"]);
    let aria = r#"{"model_type": "aria_text", "hidden_act": "gelu"}"#;
    let hint = "--layer N compiles one layer";
    config(aria).fails(2, &["an activation of shared experts alone", hint]);
}

/// The kernels by which several routers share experts, which are none of the layer's.
#[test]
fn precompile_covers_several_routers() {
    let small = Small::new();
    let cache = small.dir.path().join("cache").display().to_string();
    let words = ["precompile", "--target", "cpu", "--json", "--cache", &cache];
    let kernels = |more: &[&str]| {
        let json = with_spec(&[&words, more].concat(), &small.spec).json();
        json["kernels"].as_array().unwrap().len()
    };
    let one = kernels(&[]);
    assert!(kernels(&["--multi-gate"]) > one);
    let limited = format!("{SMALL}capacity = {{ mode = \"factor\" }}\n");
    let limited = write(small.dir.path(), "limited.toml", &limited);
    let refused = with_spec(&[&words, &["--multi-gate"][..]].concat(), &limited);
    refused.fails(2, &["--multi-gate does nothing here", "run one by one"]);
}
