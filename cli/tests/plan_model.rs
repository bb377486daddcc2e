//! `moesaic plan` of whole models.

use crate::common::*;
use serde_json::Value;

/// A model of eight layers, the first without experts.
const CONFIG: &str = r#"{ "model_type": "deepseek_v3", "torch_dtype": "bfloat16",
    "hidden_size": 1024, "num_hidden_layers": 8, "first_k_dense_replace": 1,
    "intermediate_size": 4096, "moe_intermediate_size": 512, "n_routed_experts": 16,
    "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 4, "topk_group": 2,
    "num_attention_heads": 8, "num_key_value_heads": 8, "q_lora_rank": 256, "kv_lora_rank": 128,
    "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64, "vocab_size": 32000,
    "tie_word_embeddings": false }"#;

const JOB: [&str; 6] = [
    "--world",
    "16",
    "--machine",
    "h100-ib",
    "--training",
    "--sequence=1024",
];

struct Folder(tempfile::TempDir);

impl Folder {
    fn new() -> Folder {
        let dir = scratch();
        write(dir.path(), "config.json", CONFIG);
        Folder(dir)
    }

    fn plan(&self, more: &[&str]) -> Finished {
        let mut call = command();
        call.current_dir(self.0.path()).args(["plan", "--hf", "."]);
        finish(call.args(more))
    }

    fn json(&self, more: &[&str]) -> Value {
        self.plan(&[&JOB[..], &["--json"], more].concat()).json()
    }
}

#[test]
fn a_configuration_alone_is_planned_as_a_model() {
    let folder = Folder::new();
    let text = folder.plan(&[&JOB[..], &["--top", "3"]].concat()).ok();
    for part in [
        "16 ranks of h100-ib",
        "128 sequences of 1024 tokens a step, forward and backward",
        "8 layers, 7 with experts",
        "\n  3  ",
        "experts' layers: exchanges",
        "sums of gradients",
        "the last backward pass",
        "optimizer state",
        "buffers of exchanges and kernels",
        "the second, ",
        "twice as fast",
        "by the first all ranks take",
        "no error band is known for models",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    assert!(!text.contains("\n  4  "), "{text}");
}

#[test]
fn the_parts_of_a_model_add_up() {
    let folder = Folder::new();
    let found = folder.json(&[]);
    let number = |value: &Value| value.as_f64().unwrap();
    let ranked = found["ranked"].as_array().unwrap();
    let seconds: Vec<f64> = ranked.iter().map(|one| number(&one["seconds"])).collect();
    assert!(
        seconds.windows(2).all(|pair| pair[0] <= pair[1]),
        "{seconds:?}"
    );
    for one in ranked {
        let phases = one["phases"].as_array().unwrap();
        let exposed: f64 = phases.iter().map(|phase| number(&phase["exposed"])).sum();
        assert!((exposed / number(&one["seconds"]) - 1.0).abs() < 1e-9);
        let memory = one["memory"].as_object().unwrap();
        let parts = memory
            .iter()
            .filter(|(name, _)| !matches!(&***name, "stage" | "bytes"));
        let sum: f64 = parts.map(|(_, bytes)| number(bytes)).sum();
        assert_eq!(sum, number(&memory["bytes"]));
        assert!(sum <= 80.0 * f64::from(1u32 << 30));
        let mesh = &one["mesh"];
        let dp = 16 / mesh["pp"].as_u64().unwrap() / mesh["tp"].as_u64().unwrap();
        let batch = one["micro_batch"].as_u64().unwrap() * one["micro_batches"].as_u64().unwrap();
        assert_eq!(dp * batch, 128);
    }
    assert!(number(&ranked[0]["mfu"]) > 0.05);
    let by = found["faster"].as_array().unwrap();
    assert_eq!(by.len(), 4);
}

#[test]
fn one_mesh_is_traced_and_made_a_page() {
    let folder = Folder::new();
    let more = [
        "--model-mesh=pp=2,ep=8",
        "--micro-batch=1",
        "--trace=out.json",
        "--html=out.html",
        "--overlap-batches",
    ];
    let found = folder.json(&more);
    assert_eq!(found["ranked"].as_array().unwrap().len(), 1);
    let one = &found["ranked"][0];
    assert_eq!(
        (&one["micro_batches"], &one["overlap_batches"]),
        (&16.into(), &true.into())
    );
    let read = |name: &str| std::fs::read_to_string(folder.0.path().join(name)).unwrap();
    let trace: Value = serde_json::from_str(&read("out.json")).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    let named = |part: &str| {
        let of = |event: &&Value| event["name"].as_str().unwrap().starts_with(part);
        events.iter().filter(of).count()
    };
    let parts = one["virtual_stages"].as_u64().unwrap() as usize;
    assert_eq!(named("forward "), 2 * 16 * parts);
    assert_eq!((named("optimizer"), named("sums of gradients")), (2, 2));
    let page = read("out.html");
    for part in [
        "id=\"memory\"",
        "id=\"timeline\"",
        "pp=2,tp=1,ep=8,expert_tp=1",
        "<svg ",
    ] {
        assert!(page.contains(part), "{part}");
    }
    let outside = page.matches("http").count() + page.matches("src=").count();
    assert_eq!(outside, 0, "{page}");
}

#[test]
fn what_a_model_cannot_be_says_what_can() {
    let folder = Folder::new();
    let fails = |more: &[&str], parts: &[&str]| {
        folder.plan(&[&JOB[..], more].concat()).fails(2, parts);
    };
    fails(
        &[
            "--optimizer-bytes=64",
            "--gradient-bytes=64",
            "--reserve=79GiB",
        ],
        &[
            "no mesh of 16 ranks fits this model in 80 GiB",
            "hint: 128 ranks hold it, or a machine with more memory",
        ],
    );
    fails(
        &["--model-mesh=pp=3"],
        &["16 ranks cannot make pp=3 stages: pp is a divisor of the ranks"],
    );
    fails(
        &["--model-mesh=dp=3"],
        &["`dp` is none of pp, tp, ep, expert_tp"],
    );
    fails(
        &["--batch=7", "--model-mesh=ep=8"],
        &["7 sequences a step are no multiple of 16 copies of attention"],
    );
    // An odd number of tokens cannot be shared by tp ranks, so there is more than one copy.
    let odd = [
        "--world=16",
        "--machine=h100-ib",
        "--training",
        "--sequence=1023",
    ];
    let odd = folder.plan(&[&odd[..], &["--batch=7"]].concat());
    odd.fails(2, &["--batch is a multiple of the copies"]);
    let huge = "--model-mesh=ep=4294967296,expert_tp=4294967296";
    fails(
        &[huge],
        &["expert_tp=4294967296 does not divide the 16 ranks of a stage"],
    );
    let text =
        std::fs::read_to_string(repository("runtime/planner/machines/h100-ib.toml")).unwrap();
    for (from, to, part) in [
        (
            "memory_gib = 80.0",
            "memory_gib = 0.001",
            "one layer of this model alone does not fit",
        ),
        (
            "radix = 0",
            "radix = 1",
            "machine h100-ib has at most 8 ranks, the job 16",
        ),
    ] {
        write(folder.0.path(), "small.toml", &text.replacen(from, to, 1));
        let call = ["--world=16", "--machine=small.toml", "--training"];
        folder.plan(&call).fails(2, &[part]);
    }
    fails(
        &["--mesh=ep=16"],
        &["--mesh is of one layer", "hint: --layer N"],
    );
    fails(
        &["--layers=8", "--params=1e6"],
        &[
            "--params 1.0 million is less than 8 such layers have",
            "of the whole model",
        ],
    );
    // Products of sizes that are each allowed are beyond an integer.
    let sizes = [
        "num_attention_heads",
        "q_lora_rank",
        "qk_nope_head_dim",
        "v_head_dim",
    ];
    let large = sizes.iter().fold(CONFIG.to_string(), |text, key| {
        text.replace(
            &format!("\"{key}\": "),
            &format!("\"{key}\": 1073741824, \"was\": "),
        )
    });
    write(folder.0.path(), "config.json", &large);
    fails(&[], &["no mesh of 16 ranks fits this model"]);
    for (key, value, part) in [
        ("vocab_size", "0", "expected a whole number above 0"),
        (
            "num_attention_heads",
            "0",
            "expected a whole number above 0",
        ),
        (
            "hidden_size",
            "4294967296",
            "expected a whole number up to 1073741824",
        ),
    ] {
        let own = format!("\"{key}\": {value}, \"was\"");
        write(
            folder.0.path(),
            "config.json",
            &CONFIG.replace(&format!("\"{key}\""), &own),
        );
        fails(&[], &[part]);
    }
    let long = format!("{CONFIG}{}", " ".repeat(16 << 20));
    write(folder.0.path(), "config.json", &long);
    fails(
        &[],
        &[
            "config.json is larger than 16",
            "so it is not the model configuration",
        ],
    );
    let linear = CONFIG.replace(
        "\"vocab_size\"",
        "\"layer_types\": [\"linear_attention\"], \"vocab_size\"",
    );
    write(folder.0.path(), "config.json", &linear);
    fails(
        &[],
        &[
            "layers of the kind linear_attention",
            "hint: --layers N --params N",
        ],
    );
}

/// A layer alone would be planned on few ranks that the model of it does not fit.
#[test]
fn a_published_spec_with_its_layers_fits() {
    let spec = repository("examples/specs/deepseek-v3.toml");
    let plan = |more: &[&str]| {
        let mut call = command();
        call.args([
            "plan",
            "--world=256",
            "--machine=gb200-nvl72",
            "--training",
            "--json",
        ]);
        finish(call.arg("--spec").arg(&spec).args(more)).json()
    };
    let found = plan(&[
        "--layers=58",
        "--params=671B",
        "--micro-batch=1",
        "--batch=1024",
    ]);
    let best = &found["ranked"][0];
    assert!(best["memory"]["bytes"].as_f64().unwrap() <= 180.0 * f64::from(1u32 << 30));
    assert!(found["too_large"].as_u64().unwrap() > 0);
    let parameters = found["model"]["parameters"].as_f64().unwrap();
    assert!((parameters / 671e9 - 1.0).abs() < 1e-9);
    assert!(best["mesh"]["ep"].as_u64().unwrap() >= 8, "{best}");
}

/// The mesh that somebody runs, beside the first: its place, or the reason why it cannot be.
#[test]
fn a_mesh_is_compared_with_the_first() {
    let folder = Folder::new();
    let found = folder.json(&["--compare=ep=2"]);
    let own = &found["compared"]["configuration"];
    let place = found["compared"]["place"].as_u64().unwrap() as usize;
    assert_eq!(own["mesh"]["ep"], 2);
    let ranked = folder.json(&["--top=1000"]);
    assert_eq!(&ranked["ranked"][place - 1], own);
    assert!(folder.json(&[])["compared"].is_null());
    let doubled = found["doubled"].as_array().unwrap();
    let best = found["ranked"][0]["seconds"].as_f64().unwrap();
    assert_eq!(doubled.len(), 4);
    for part in doubled {
        let seconds = part["seconds"].as_f64().unwrap();
        assert!(seconds <= best && seconds > best / 2.0, "{part}");
    }
    let text = folder.plan(&[&JOB[..], &["--compare=ep=2"]].concat()).ok();
    let said = format!("\nep 2 is place {place} of ");
    assert!(text.contains(&said), "{text}");
    assert!(text.contains("FIRST") && text.contains("experts' layers: kernels"));
    let refused = |mesh: &str, part: &str| {
        let compare = ["--compare", mesh];
        folder
            .plan(&[&JOB[..], &compare].concat())
            .fails(2, &[part]);
    };
    let page = folder.0.path().join("page.html");
    let page = page.to_str().unwrap();
    folder
        .plan(&[&JOB[..], &["--compare=ep=2", "--html", page]].concat())
        .ok();
    let page = std::fs::read_to_string(page).unwrap();
    let said = format!("<p>ep 2 is place {place} of ");
    assert!(page.contains(&said) && page.contains("href=\"#compared\""));
    refused("tp=3", "tp=3 does not divide the 16 ranks of a stage");
    refused("ep=32", "ep=32 x expert_tp=1 does not divide the 16 ranks");
}

/// Meshes whose steps are closer than predictions err tie, and headroom decides; a named reserve
/// ranks by time alone.
#[test]
fn headroom_leads_a_tie() {
    let spec = repository("examples/specs/deepseek-v3.toml");
    let plan = |more: &[&str]| {
        let mut call = command();
        let job = ["plan", "--world=256", "--machine=gb300-nvl72", "--training"];
        let model = ["--layers=58", "--params=671B", "--top=100"];
        finish(
            call.args(job)
                .args(model)
                .arg("--spec")
                .arg(&spec)
                .args(more),
        )
    };
    let found = plan(&["--json"]).json();
    let number = |value: &Value| value.as_f64().unwrap();
    let ties = &found["ties"];
    let (tied, roomy) = (ties["tied"].as_u64(), ties["with_headroom"].as_u64());
    let (tied, roomy) = (tied.unwrap() as usize, roomy.unwrap() as usize);
    assert!(0 < roomy && roomy < tied && tied < 100, "{ties}");
    let limit = 268.0 * f64::from(1u32 << 30);
    let used = |one: &Value| {
        let memory = &one["memory"];
        (number(&memory["bytes"]) - number(&memory["reserve"])) / limit
    };
    let longest = 1.063 * number(&ties["fastest"]["seconds"]);
    for (at, one) in found["ranked"].as_array().unwrap().iter().enumerate() {
        assert_eq!(number(&one["seconds"]) <= longest, at < tied, "{at}");
        assert!(at >= roomy || used(one) <= 0.8, "{at}");
    }
    assert!(used(&ties["fastest"]) > 0.8);
    let text = plan(&[]).ok();
    let said = format!("\n{tied} meshes tie, their steps within 6.3 % of the fastest");
    assert!(text.contains(&said) && text.contains("with less free, the fastest is "));
    assert!(text.contains("\n    1 =  "), "{text}");
    let text = plan(&["--reserve=20GiB"]).ok();
    assert!(!text.contains(" tie") && !text.contains(" =  "), "{text}");
}

/// Weights of one byte need half the memory of bf16, and a depth beyond all models is refused.
#[test]
fn bytes_of_weights_and_layers_have_bounds() {
    let folder = Folder::new();
    let weights = |more: &[&str]| {
        let found = folder.json(&[&["--model-mesh=ep=16"], more].concat());
        found["ranked"][0]["memory"]["weights"].as_f64().unwrap()
    };
    assert_eq!(weights(&["--weight-bytes=1"]), weights(&[]) / 2.0);
    let deep = CONFIG.replace("\"num_hidden_layers\": 8", "\"num_hidden_layers\": 99000");
    write(folder.0.path(), "config.json", &deep);
    folder.plan(&JOB).fails(
        2,
        &["99000 layers are more than the 10000 that are planned"],
    );
    // Bytes of more parameters are beyond an integer, and would be shown as 16777216 TiB.
    let params =
        |count: &str| folder.plan(&[&JOB[..], &["--layers=8", "--params", count]].concat());
    for count in ["1e30", "inf", "1e300T"] {
        params(count).fails(2, &["a model has at most 1e15 parameters"]);
    }
    for count in ["nan", "0", "B", "7X"] {
        params(count).fails(2, &["write it as 671e9, 671B or 1T"]);
    }
    params("1M").fails(2, &["--params 1.0 million is less than"]);
}

/// A slower link makes no step shorter; a part that the machine lacks is refused by name.
#[test]
fn a_part_of_the_machine_is_slower() {
    let folder = Folder::new();
    let seconds = |more: &[&str]| {
        let found = folder.json(&[&["--model-mesh=ep=16"], more].concat());
        found["ranked"][0]["seconds"].as_f64().unwrap()
    };
    let (whole, half) = (seconds(&[]), seconds(&["--speed=ib=0.5"]));
    assert!(half > whole, "{half} {whole}");
    assert_eq!(seconds(&["--speed=ib=0.5,ib=2"]), whole);
    let refused = |speed: &str, part: &str| {
        let speed = ["--speed", speed];
        folder.plan(&[&JOB[..], &speed].concat()).fails(2, &[part]);
    };
    refused(
        "wifi=2",
        "h100-ib has no part `wifi`: its parts are arithmetic, memory, nvlink, ib",
    );
    refused("ib=0", "`0` is no factor from 0.01 to 100");
}

/// No line is wider than the terminal, but for words that are.
#[test]
fn a_plan_is_as_wide_as_the_terminal() {
    let folder = Folder::new();
    let mut call = command();
    call.current_dir(folder.0.path()).env("COLUMNS", "80");
    let text = finish(
        call.args(["plan", "--hf", "."])
            .args(JOB)
            .arg("--compare=ep=2"),
    )
    .ok();
    let wide: Vec<&str> = text
        .lines()
        .filter(|line| line.chars().count() > 80)
        .collect();
    assert!(wide.is_empty(), "{wide:#?}");
}
