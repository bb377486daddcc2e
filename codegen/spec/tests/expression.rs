//! Expressions of custom activations: accepted texts, refused texts and derivatives.

use moesaic_spec::expression::{Id, MathFunction, Node};
use moesaic_spec::{Activation, Expression, LayerSpec};

fn parse(text: &str) -> Expression {
    Expression::parse(text).unwrap_or_else(|e| panic!("{text}: {e} at {:?}", e.span))
}

/// Evaluates all nodes at x, except the functions that std lacks.
fn values(expression: &Expression, x: f64) -> Vec<f64> {
    let mut values: Vec<f64> = Vec::new();
    for node in expression.nodes() {
        let of = |id: Id| values[id.index()];
        values.push(match *node {
            Node::X => x,
            Node::Constant(value) => value,
            Node::Negate(a) => -of(a),
            Node::Add(a, b) => of(a) + of(b),
            Node::Subtract(a, b) => of(a) - of(b),
            Node::Multiply(a, b) => of(a) * of(b),
            Node::Divide(a, b) => of(a) / of(b),
            Node::Power(a, n) => of(a).powi(n),
            Node::Call(function, a) => call(function, of(a)),
            Node::Choose {
                left,
                right,
                or_equal,
                then,
                otherwise,
            } => {
                let holds = of(left) < of(right) || (or_equal && of(left) == of(right));
                if holds { of(then) } else { of(otherwise) }
            }
        });
    }
    values
}

fn call(function: MathFunction, x: f64) -> f64 {
    match function {
        MathFunction::Exp => x.exp(),
        MathFunction::Log => x.ln(),
        MathFunction::Sqrt => x.sqrt(),
        MathFunction::Tanh => x.tanh(),
        MathFunction::Sigmoid => 1.0 / (1.0 + (-x).exp()),
        MathFunction::Softplus => x.exp().ln_1p(),
        MathFunction::Abs => x.abs(),
        MathFunction::Erf => panic!("not in std"),
    }
}

fn value(expression: &Expression, x: f64) -> f64 {
    values(expression, x)[expression.value().index()]
}

fn slope(expression: &Expression, x: f64) -> f64 {
    values(expression, x)[expression.slope().index()]
}

#[test]
fn values_follow_the_usual_rules() {
    let cases: [(&str, f64, f64); 16] = [
        ("1 + 2 * x", 3.0, 7.0),
        ("(1 + 2) * x", 3.0, 9.0),
        ("x - 1 - 1", 5.0, 3.0),
        ("x / 2 / 2", 8.0, 2.0),
        ("-x^2", 3.0, -9.0),
        ("(-x)^2", 3.0, 9.0),
        ("2 * -x", 3.0, -6.0),
        ("x^-2", 2.0, 0.25),
        ("x ^ 3 * 2", 2.0, 16.0),
        ("1.5e1*x", 2.0, 30.0),
        (".5*x", 2.0, 1.0),
        ("min(x, 6)", 9.0, 6.0),
        ("max(relu(x), step(x))", 0.5, 1.0),
        ("where(x >= 2, 1, x)", 2.0, 1.0),
        ("where(x > 2, 1, x)", 2.0, 2.0),
        ("\t x+pi-pi ", 2.0, 2.0),
    ];
    for (text, x, want) in cases {
        let got = value(&parse(text), x);
        assert!((got - want).abs() < 1e-12, "{text} at {x}: {got}");
    }
}

#[test]
fn derivatives_are_central_differences() {
    let texts = [
        "x * sigmoid(1.7 * x)",
        "x / (1 + exp(-x))",
        "x * tanh(log(1 + exp(x)))",
        "exp(-x^2) * x^3 - 4 / (x^2 + 1)",
        "sqrt(x^2 + 1) / (2 + tanh(x))",
        "where(x < 0.3, exp(x) - 1, x * x)",
        "abs(x) + max(x, 0.1 * x) - min(x, -x^2)",
        "x^-3 + log(x^4)",
        "(((x + 1)^2)^3)^-1",
        "relu(x)^2 - relu(-x) * step(x + 2)",
        "-(-(x - 3)) * -x / -(x^2 + 2)",
    ];
    for text in texts {
        let expression = parse(text);
        for x in [-2.7, -1.1, -0.4, 0.7, 1.3, 3.9] {
            let h = 1e-6;
            let want = (value(&expression, x + h) - value(&expression, x - h)) / (2.0 * h);
            let got = slope(&expression, x);
            assert!(
                (got - want).abs() <= 1e-7 * want.abs().max(1.0),
                "{text} at {x}: {got}, not {want}"
            );
        }
    }
}

/// Forms that overflow in f32 are rewritten into ones that do not.
#[test]
fn logistic_forms_are_recognised() {
    let calls = |text| {
        let nodes = parse(text).nodes().to_vec();
        let list = nodes.into_iter().filter_map(|node| match node {
            Node::Call(function, _) => Some(function),
            _ => None,
        });
        list.collect::<Vec<_>>()
    };
    // The exponential that the parser read first remains as an unused node.
    let silu = parse("x / (1 + exp(-x))");
    let Node::Multiply(_, sigmoid) = silu.nodes()[silu.value().index()] else {
        panic!("{:?}", silu.nodes());
    };
    assert!(matches!(
        silu.nodes()[sigmoid.index()],
        Node::Call(MathFunction::Sigmoid, _)
    ));
    assert!(calls("log(exp(x) + 1)").contains(&MathFunction::Softplus));
}

#[test]
fn kinks_have_slope_zero_at_zero() {
    for text in ["relu(x)", "abs(x)", "relu(x)^2", "x * step(x)"] {
        assert_eq!(slope(&parse(text), 0.0), 0.0, "{text}");
    }
    let relu = parse("relu(x)");
    assert!(value(&relu, f64::NAN).is_nan());
    assert!(value(&parse("min(6, x)"), f64::NAN).is_nan());
}

#[test]
fn errors_name_the_place() {
    let cases = [
        ("", "ends too early", 0..0),
        ("x *", "ends too early", 2..3),
        ("x + y", "unknown name `y`", 4..5),
        ("x * sigmod(x)", "unknown name `sigmod`", 4..10),
        ("x x", "`x` cannot stand here", 2..3),
        ("(x", "ends too early", 1..2),
        ("exp x", "`x` cannot stand here", 4..5),
        ("x ^ 2.5", "whole number", 4..5),
        ("x ^ y", "whole number", 4..5),
        ("x ^ 1000", "too large", 4..8),
        ("x ^ -1000000", "too large", 4..12),
        ("x ^ 99999999999999999999", "too large", 4..24),
        ("x ^ é", "whole number", 4..6),
        ("x ^", "whole number", 3..3),
        ("min(x)", "`)` cannot stand here", 5..6),
        ("where(x, 1, 2)", "`,` cannot stand here", 7..8),
        ("x + log(0)", "this is -inf", 4..10),
        ("x + 1/0", "this is inf", 4..7),
        ("x * 1e39", "beyond the range", 4..8),
        ("1.2.3 * x", "not a number", 0..5),
        ("1 + 2", "does not use `x`", 0..5),
        ("x\n+ 1", "cannot stand here", 1..2),
        ("x + é", "cannot stand here", 4..6),
        ("sin(x)", "unknown name `sin`", 0..3),
    ];
    for (text, message, span) in cases {
        let error = Expression::parse(text).expect_err(text);
        assert!(error.message.contains(message), "{text}: {}", error.message);
        assert_eq!(error.span, span, "{text}: {}", error.message);
    }
}

#[test]
fn nothing_that_is_read_takes_long_or_overflows() {
    let nested = "(".repeat(400) + "x" + &")".repeat(400);
    let error = Expression::parse(&nested).expect_err("too deep");
    assert!(error.message.contains("levels"), "{}", error.message);
    assert!(Expression::parse(&"-".repeat(999)).is_err());
    assert!(Expression::parse(&"x+".repeat(600)).is_err());
    let relus = "relu(".repeat(60) + "erf(1)" + &")".repeat(60);
    assert!(Expression::parse(&relus).is_err());
    let products = "tanh(".repeat(60) + "x" + &")".repeat(60);
    let expression = parse(&products);
    assert!(
        expression.nodes().len() < 400,
        "{}",
        expression.nodes().len()
    );
    for seed in 0..20_000u64 {
        let alphabet = b"x+-*/^()., 0123.5eexpminwhere<=>tanh";
        let text: String = (0..seed % 40)
            .map(|i| {
                let mixed = (seed * 41 + i).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 33;
                char::from(alphabet[mixed as usize % alphabet.len()])
            })
            .collect();
        let _ = Expression::parse(&text);
    }
}

#[test]
fn a_spec_keeps_the_text() {
    let head = "shape = { model_dim = 4, hidden_dim = 4, experts = 1, top_k = 1 }\n";
    let own = r#"experts.activation = { expr = "x * sigmoid(1.7 * x)" }"#;
    let spec = LayerSpec::from_toml(&format!("{head}{own}")).expect("a valid spec");
    let Activation::Custom(expression) = &spec.experts.activation else {
        panic!("{:?}", spec.experts.activation);
    };
    assert_eq!(expression.text(), "x * sigmoid(1.7 * x)");
    assert_eq!(
        LayerSpec::from_toml(&spec.to_toml()).expect("it reads back"),
        spec
    );
    let json = serde_json::to_string(&spec).expect("json");
    assert_eq!(
        serde_json::from_str::<LayerSpec>(&json).expect("it reads back"),
        spec
    );
}
