"""The paper's claims, measured with this code: run lists, measurements, results and the page. Not in the wheel."""
