use super::*;

#[test]
fn a_section_changes_only_the_keys_that_it_names() {
    assert_eq!(Settings::read("").unwrap(), Settings::default());
    let text = "[policy]\nidle = 3\ngroup = 8\n[policy.pressure]\nstall = 70\n";
    let settings = Settings::read(text).unwrap();
    let pressure = Pressure { stall: 70, ..Pressure::default() };
    assert_eq!(settings, Settings { idle: 3, group: 8, pressure, ..Settings::default() });
    assert!(!Settings::read("[policy]\nenabled = false\n").unwrap().enabled);
    // A key that is left out has its value in the base, and a key of a table in it, too.
    let text = "[policy]\nlevel = 3\n[policy.pressure]\nwindow = 4000\n";
    let mut base = Settings::small();
    base.pressure.stall = 7;
    let expected = Settings {
        level: 3,
        pressure: Pressure { window: 4000, ..base.pressure.clone() },
        ..base.clone()
    };
    assert_eq!(Settings::read_over(text, &base).unwrap(), expected);
    let error = Settings::read_over("[policy]\nlevels = 3\n", &base).unwrap_err();
    assert!(std::error::Error::source(&error).unwrap().to_string().contains("levels"));
}

#[test]
fn keys_that_need_a_backing_device_are_listed() {
    let alone = "[policy]\nbacking_size = 4096\nwriteback_limit = 5\nidle = 3\n";
    let settings = Settings::read(alone).unwrap();
    assert_eq!(settings.without_effect(), ["backing_size", "writeback_limit"]);
    let with = format!("{alone}backing_dev = '/dev/vdb'\n");
    assert!(Settings::read(&with).unwrap().without_effect().is_empty());
    assert!(Settings::default().without_effect().is_empty());
}

#[test]
fn unknown_keys_and_values_are_refused() {
    for (text, expected) in [
        ("[policy]\nidel = 3\n", "unknown field `idel`"),
        ("[polizy]\n", "unknown field `polizy`"),
        ("[policy.pressure]\nfiles = 'x'\n", "unknown field `files`"),
        ("[policy]\nidle = 8\n", "idle = 8, expected 1 to 7"),
        ("[policy]\nidle = -1\n", "-1, expected 1 to 7 periods"),
        ("[policy]\nwriteback_idle = 256\n", "256, expected 1 to 7 periods"),
        ("[policy]\nidle = 'x'\n", "invalid type"),
        ("[policy]\ngroup = 0\n", "group = 0, expected 1, or 8 to 32"),
        ("[policy]\ncpu = 101\n", "cpu = 101"),
        ("[policy]\nlevel = 77\n", "zstd at level 77"),
        ("[policy]\ncodec = 'none'\n", "codec none"),
        ("[policy]\ndictionary = 'on'\n", "none of auto, off"),
        ("[policy]\ndictionary_pages = 9\n", "dictionary_pages = 9"),
        ("[policy.pressure]\nstall = 3000\n", "pressure.stall = 3000"),
        ("[policy", "cannot read"),
    ] {
        let error = Settings::read(text).unwrap_err();
        let source = std::error::Error::source(&error).map(ToString::to_string);
        let said = format!("{error}: {}", source.unwrap_or_default());
        assert!(said.contains(expected), "{text}: {said}");
    }
}
