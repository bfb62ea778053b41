//! Plain text tables.

/// Lines up `rows` under `head`: the first column to the left, the others to the right.
pub fn render(head: &[&str], rows: &[Vec<String>]) -> String {
    let width = |column: usize| {
        let cells = rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count());
        cells.chain([head[column].chars().count()]).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..head.len()).map(width).collect();
    let line = |cells: Vec<&str>| {
        let mut text = String::from(" ");
        for (nth, (cell, &width)) in cells.iter().zip(&widths).enumerate() {
            match nth {
                0 => text.push_str(&format!(" {cell:<width$}")),
                _ => text.push_str(&format!("  {cell:>width$}")),
            }
        }
        text.trim_end().to_owned() + "\n"
    };
    let mut text = line(head.to_vec());
    let rule = widths.iter().sum::<usize>() + 2 * (widths.len() - 1);
    text.push_str(&format!("  {}\n", "-".repeat(rule)));
    for row in rows {
        text.push_str(&line(row.iter().map(String::as_str).collect()));
    }
    text
}

/// Megabytes (10^6 bytes).
pub fn megabytes(bytes: u64) -> String {
    format!("{:.1} MB", to_f64(bytes) / 1e6)
}

/// Seconds, from milliseconds.
pub fn seconds(ms: u64) -> String {
    format!("{:.2} s", to_f64(ms) / 1e3)
}

/// The nearest floating-point number; figures of a run are far below 2^53.
pub fn to_f64(value: u64) -> f64 {
    #[expect(clippy::cast_precision_loss, reason = "milliseconds and bytes of one run")]
    let value = value as f64;
    value
}

#[cfg(test)]
mod tests {
    use super::render;

    #[test]
    fn columns_line_up() {
        let text = render(&["method", "time"], &[vec!["a".into(), "1 s".into()]]);
        assert_eq!(text, "  method  time\n  ------------\n  a        1 s\n");
    }
}
