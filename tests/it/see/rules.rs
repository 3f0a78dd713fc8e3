//! The dashboard and the alert rules in `deploy/`: they ask for what the driver has, in words that
//! Prometheus understands.

use super::{Samples, Watched, family_of, promtool};
use qsd_csi::csi::pb::csi as pb;
use serde_json::Value;
use std::{collections::BTreeSet, fs, io::Write as _, path::PathBuf};

/// Metrics of Prometheus itself.
const OF_PROMETHEUS: [&str; 1] = ["up"];

fn deploy(path: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("deploy").join(path)
}

fn rules() -> String {
    fs::read_to_string(deploy("prometheus/qsd-csi.yaml")).unwrap()
}

/// Every expression of the dashboard, as Grafana hands it to Prometheus.
fn queries() -> Vec<String> {
    fn collect(value: &Value, found: &mut Vec<String>) {
        match value {
            Value::Object(fields) => {
                found.extend(fields.get("expr").map(|expr| expr.as_str().unwrap().to_owned()));
                for value in fields.values() {
                    collect(value, found);
                }
            }
            Value::Array(values) => {
                for value in values {
                    collect(value, found);
                }
            }
            Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
        }
    }
    let text = fs::read_to_string(deploy("grafana/qsd-csi.json")).unwrap();
    let mut found = Vec::new();
    collect(&serde_json::from_str(&text).unwrap(), &mut found);
    let expanded =
        |query: String| query.replace("$__rate_interval", "5m").replace("$instance", ".*");
    found.into_iter().map(expanded).collect()
}

/// The metrics of ours that a text names.
fn metrics_in(text: &str) -> BTreeSet<String> {
    let is_part = |letter: char| letter.is_ascii_alphanumeric() || letter == '_';
    let words = text.split(|letter| !is_part(letter));
    let is_ours = |word: &&str| word.starts_with("qsd_csi_") || word.starts_with("process_");
    words.filter(is_ours).map(str::to_owned).collect()
}

/// The words before an opening brace or bracket: metrics, whoever has them.
fn selected_in(expr: &str) -> BTreeSet<String> {
    let is_part = |letter: char| letter.is_ascii_alphanumeric() || letter == '_' || letter == ':';
    let before = |(at, _): (usize, &str)| {
        let word = expr[..at].rsplit(|letter| !is_part(letter)).next().unwrap();
        (!word.is_empty()).then(|| word.to_owned())
    };
    expr.match_indices('{').filter_map(before).collect()
}

async fn printed() -> Samples {
    let watched = Watched::start_with(&[]).await;
    let driver = &watched.driver;
    driver.published("pvc-1").await;
    let request = pb::CreateSnapshotRequest {
        name: "monday".to_owned(),
        source_volume_id: "pvc-1".to_owned(),
        ..Default::default()
    };
    driver.controller().create_snapshot(request).await.unwrap();
    let all = watched.metrics().await;
    driver.remove("pvc-1").await;
    all
}

#[tokio::test(flavor = "multi_thread")]
async fn dashboard_and_alerts_ask_for_metrics_that_there_are() {
    let all = printed().await;
    let (rules, queries) = (rules(), queries());
    assert!(queries.len() > 40, "{} queries", queries.len());
    let asked = metrics_in(&[rules.as_str(), &queries.join("\n")].concat());
    assert!(asked.len() > 40, "{asked:?}");
    let is_there = |name: &&String| all.kinds.contains_key(family_of(&all.kinds, name));
    let missing: Vec<_> = asked.iter().filter(|name| !is_there(name)).collect();
    assert!(missing.is_empty(), "the driver has none of these: {missing:?}\n{}", all.text);
    for query in &queries {
        let others = selected_in(query)
            .into_iter()
            .filter(|name| !asked.contains(name) && !OF_PROMETHEUS.contains(&name.as_str()));
        assert_eq!(others.count(), 0, "{query}");
    }
    // Nobody sees what is in none of them.
    let is_asked = |name: &&String| asked.iter().any(|one| family_of(&all.kinds, one) == *name);
    let unseen: Vec<_> = all.kinds.keys().filter(|name| !is_asked(name)).collect();
    assert!(unseen.is_empty(), "nobody looks at {unseen:?}");
    let in_jobs = |name: &&String| name.starts_with("qsd_csi_job_"); // only while one runs
    let series = all.names();
    let silent = |name: &&String| !in_jobs(name) && !series.iter().any(|one| one == *name);
    let silent: Vec<_> = asked.iter().filter(silent).collect();
    assert!(silent.is_empty(), "of these the driver prints no value: {silent:?}\n{}", all.text);
}

#[test]
fn every_alert_says_what_it_means_and_what_to_do() {
    let rules = rules();
    let (_, alerts) = rules.split_once("- alert: ").unwrap();
    let alerts: Vec<_> = alerts.split("- alert: ").collect();
    let tried = fs::read_to_string(
        PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/it/see/alerts.yaml"),
    )
    .unwrap();
    let mut names = BTreeSet::new();
    for alert in alerts {
        let name = alert.lines().next().unwrap();
        assert!(names.insert(name), "{name} is there twice");
        for key in ["expr: ", "severity: ", "summary: ", "description: ", "action: "] {
            assert_eq!(alert.matches(&format!(" {key}")).count(), 1, "{name}: {key}");
        }
        assert!(tried.contains(&format!("alertname=\"{name}\"")), "{name} is not tried");
    }
    assert!(names.len() > 15);
}

/// By Prometheus' own tool, which evaluates the rules over samples.
#[test]
fn alerts_are_raised_when_they_should_be_and_only_then() {
    let rules = deploy("prometheus/qsd-csi.yaml");
    let said =
        promtool(&["check", "rules", "--lint=all", "--lint-fatal", rules.to_str().unwrap()], "");
    assert!(said.contains("SUCCESS"), "{said}");
    let tests = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/it/see/alerts.yaml");
    let said = promtool(&["test", "rules", tests.to_str().unwrap()], "");
    assert!(said.contains("SUCCESS"), "{said}");
}

#[test]
fn every_query_of_the_dashboard_is_one() {
    let mut rules = tempfile::NamedTempFile::new().unwrap();
    writeln!(rules, "groups:\n  - name: dashboard\n    rules:").unwrap();
    for (number, query) in queries().iter().enumerate() {
        let query = serde_json::to_string(query).unwrap(); // a string of JSON is one of YAML
        writeln!(rules, "      - record: query:{number}\n        expr: {query}").unwrap();
    }
    let said = promtool(&["check", "rules", rules.path().to_str().unwrap()], "");
    assert!(said.contains("SUCCESS"), "{said}");
}
