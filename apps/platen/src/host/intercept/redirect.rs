//! A rule that redirects, read from platen's own text or from nft's list. nft writes other parts of
//! the rule in other words, by its version.

use std::collections::BTreeSet;

/// The parts of a redirect: the texts of its numbers.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Redirect {
    users: BTreeSet<String>,
    addresses: BTreeSet<String>,
    ports: BTreeSet<String>,
    door: String,
    /// `PORT : PORT`, as QEMU is told it, and at the door.
    map: BTreeSet<String>,
}

impl Redirect {
    /// All redirects of a text, in their order.
    pub(super) fn all(text: &str) -> Vec<Self> {
        // How each rule begins. nft may break its lines.
        text.split("meta mark").filter_map(Self::of).collect()
    }

    fn of(rule: &str) -> Option<Self> {
        let (from, to) = rule.split_once("dnat to ")?;
        Some(Self {
            users: set(from, "meta skuid ")?,
            addresses: set(from, "ip daddr ")?,
            ports: set(from, "tcp dport ")?,
            door: to.split([' ', ':']).next()?.to_owned(),
            map: set(to, "map ")?,
        })
    }
}

/// The elements in the brackets behind `key`, or the one word there.
fn set(rule: &str, key: &str) -> Option<BTreeSet<String>> {
    let (_, rest) = rule.split_once(key)?;
    let elements = match rest.strip_prefix('{') {
        Some(rest) => rest.split_once('}')?.0,
        None => rest.split_whitespace().next()?,
    };
    let plain = |element: &str| element.split_whitespace().collect::<Vec<_>>().join(" ");
    Some(elements.split(',').map(plain).collect())
}

#[cfg(test)]
mod tests {
    use super::super::rules::tests::without_c;
    use super::super::rules::{addresses, Rules};
    use super::super::tests::settings;
    use crate::host::settings::Settings;

    /// Regression: each rule that led to the door of the host was taken for that of the
    /// configuration, whatever its ports, users and addresses were.
    #[test]
    fn rules_of_another_configuration_are_missing() {
        let of_b = "intercept = \"60000-60001\"\n";
        // By nft 1.0.6.
        let listed = "table ip platen {\n\tchain intercept {\n\t\t\
            type nat hook output priority -100; policy accept;\n\t\t\
            meta mark != 0x706c6174 meta skuid { 0, 64055 } ip daddr 10.0.0.2 tcp dport \
            60000-60001 tcp flags 0x2 / 0x1,0x2,0x4,0x10 counter packets 3 bytes 180 dnat to \
            127.80.0.2:tcp dport map { 60000 : 110, 60001 : 111 }\n\t\tct state 0x8 accept\n\t}\n}\n";
        let missing =
            |settings: &Settings, listed: &str| Rules::new(settings, addresses).missing_in(listed);
        assert_eq!(missing(&settings(of_b), listed), [""; 0]);
        let broken = listed.replace(" }\n\t\tct", ",\n\t\t\t     60001 : 111 }\n\t\tct");
        assert_eq!(missing(&settings(of_b), &broken), [""; 0], "a line that nft has broken");
        for listed in [
            "",
            "table ip platen {\n}\n",
            &listed.replace("60001", "60002"),
            &listed.replace("60001 : 111", "60001 : 112"),
            &listed.replace(", 64055", ""),
            &listed.replace("{ 0, 64055 }", "0"),
            &listed.replace("10.0.0.2", "{ 10.0.0.2, 10.0.0.3 }"),
            &listed.replace("127.80.0.2", "127.80.0.3"),
            &listed.replace("dnat to", "counter comment"),
        ] {
            assert_eq!(missing(&settings(of_b), listed), ["b"], "{listed}");
        }
        let more = settings("intercept = \"60000-60002\"\n");
        assert_eq!(missing(&more, listed), ["b"]);
        let mut config = settings(of_b).config;
        config.allow_users.push("107".into());
        let more = Settings::given(config, "a".into()).unwrap();
        assert_eq!(missing(&more, listed), ["b"]);
        // Its rule stays while its name cannot be looked up.
        let lost = without_c(settings);
        assert_eq!(lost.missing_in(listed), ["c"]);
        assert_eq!(lost.missing_in(&format!("{listed} dnat to 127.80.0.3:tcp")), [""; 0]);
    }
}
