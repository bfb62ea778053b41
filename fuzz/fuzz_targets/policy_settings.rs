//! A policy file, and a pressure stall file: settings that pass their own check, or an error that
//! gives the reason.
#![no_main]

use libfuzzer_sys::fuzz_target;
use policy::Settings;

fuzz_target!(|input: &[u8]| {
    let _ = policy::stalled(input);
    let Ok(text) = std::str::from_utf8(input) else { return };
    match Settings::read(text) {
        Ok(settings) => {
            settings.check().expect("what was read is checked");
            assert!(settings.idle <= 7 && settings.group <= 32 && settings.cpu <= 100);
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    }
});
