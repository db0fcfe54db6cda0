import java.io.ByteArrayInputStream;
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpRequest.BodyPublishers;
import java.net.http.HttpResponse.BodyHandlers;
import java.util.stream.Collectors;

/** java.net.http as it is by default: it offers HTTP/2 with each request to an http:// address, bodies or not. */
class Upgrading {
    public static void main(String[] arguments) throws Exception {
        var client = HttpClient.newHttpClient();
        var url = arguments[0];
        var body = arguments[1];
        for (int i = 0; i < 2; i++) {
            for (var publisher : new HttpRequest.BodyPublisher[] {
                BodyPublishers.ofString(body),
                BodyPublishers.ofInputStream(() -> new ByteArrayInputStream(body.getBytes())),
            }) {
                var request = HttpRequest.newBuilder(URI.create(url + "/completions"))
                    .header("Content-Type", "application/json").POST(publisher).build();
                var response = client.send(request, BodyHandlers.ofLines());
                var lines = response.body().collect(Collectors.joining("\\n"));
                System.out.println(response.version() + " " + response.statusCode() + " " + lines);
            }
            var models = client.send(HttpRequest.newBuilder(URI.create(url + "/models")).build(), BodyHandlers.ofString());
            System.out.println(models.version() + " " + models.statusCode() + " " + models.body());
        }
    }
}
